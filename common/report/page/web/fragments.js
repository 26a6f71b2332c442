// Look-ups in a grid: an element's holder is thread * values + value.
worklog.models.fragments = {
    holder(grid, row, column) {
        const held = grid.holders[row * grid.columns + column];
        const values = grid.words.length;
        return { thread: Math.floor(held / values), value: held % values };
    },

    // The [row, column] of each value of a thread, in the order of its registers.
    elements(grid, thread) {
        const values = grid.words.length;
        const elements = Array(values);
        grid.holders.forEach((held, n) => {
            const value = held - thread * values;
            if (value >= 0 && value < values) elements[value] = [Math.floor(n / grid.columns), n % grid.columns];
        });
        return elements;
    },
};

worklog.sections.fragments = (root, views) => {
    const { holder, elements } = worklog.models.fragments;
    const WARP = 32, ROWS = 16; // ROWS of a grid are a warp's
    const WIDTH = 32, HEIGHT = 22, TOP = 20, EDGE = 26, ADDRESS = 34; // pixels
    const told = root.querySelector(".told");
    const holds = root.querySelector(".holds");
    const boards = root.querySelector(".boards");

    let view = views[0];
    let chosen = { thread: 5, grid: view.grids[0], row: 0, column: 0 };
    let shown = null; // the view and the warp that are drawn
    const marks = []; // a function for each grid that shows what is chosen

    const option = (value, title) => worklog.element("option", { value }, title);
    const number = () => worklog.element("input", { type: "number", inputMode: "numeric", min: 0, step: 1 });
    const inputs = {
        view: worklog.element("select", {}, ...views.map((each, n) => option(n, each.title))),
        thread: number(),
        grid: worklog.element("select"),
        row: number(),
        column: number(),
    };
    const titles = { view: "Instruction", thread: "Thread", grid: "Element of", row: "row", column: "column" };
    root.querySelector(".controls").append(
        ...Object.entries(inputs).map(([key, input]) => worklog.element("label", {}, titles[key], input)),
    );
    inputs.view.addEventListener("input", () => {
        view = views[inputs.view.value];
        chooseThread(Math.min(chosen.thread, view.threads - 1), view.grids[0]);
    });
    inputs.thread.addEventListener("input", () => {
        if (valid(inputs.thread)) chooseThread(inputs.thread.valueAsNumber, chosen.grid);
    });
    inputs.grid.addEventListener("input", () => chooseThread(chosen.thread, view.grids[inputs.grid.value]));
    for (const input of [inputs.row, inputs.column]) {
        input.addEventListener("input", () => {
            const [row, column] = [inputs.row.valueAsNumber, inputs.column.valueAsNumber];
            if (valid(inputs.row) && valid(inputs.column)) chooseElement(chosen.grid, row, column);
        });
    }
    chooseThread(chosen.thread, chosen.grid);

    function valid(input) {
        const allowed = input.value !== "" && input.checkValidity();
        if (!allowed) told.textContent = `A whole number from 0 to ${input.max} is needed.`;
        return allowed;
    }

    function chooseThread(thread, grid) {
        const [row, column] = elements(grid, thread)[0];
        chooseElement(grid, row, column);
    }

    function chooseElement(grid, row, column) {
        chosen = { grid, row, column, ...holder(grid, row, column) };
        const warp = Math.floor(chosen.thread / WARP);
        if (shown?.view !== view || shown.warp !== warp) {
            shown = { view, warp };
            root.querySelector(".what").textContent = view.text;
            inputs.grid.replaceChildren(...view.grids.map((each, n) => option(n, each.name)));
            marks.length = 0;
            boards.replaceChildren(...view.grids.map((each) => board(each, warp * ROWS)));
        }
        inputs.thread.max = view.threads - 1;
        inputs.row.max = grid.rows - 1;
        inputs.column.max = grid.columns - 1;
        inputs.grid.value = view.grids.indexOf(grid);
        const now = { thread: chosen.thread, row, column };
        // Not under the cursor of someone who is typing the same number.
        for (const [key, value] of Object.entries(now)) {
            if (inputs[key].valueAsNumber !== value) inputs[key].value = value;
        }
        for (const mark of marks) mark();
        told.textContent = whoHolds();
        holds.replaceChildren(...whatIsHeld());
    }

    function whoHolds() {
        const { grid, row, column, thread, value } = chosen;
        const who = (n) => (view.threads > WARP ? `thread ${n}` : `lane ${n}`);
        let element = `${grid.name}[${row}, ${column}] is in ${grid.words[value]} of ${who(thread)}`;
        if (view.linked) {
            for (const other of view.grids.filter((each) => each !== grid)) {
                const there = holder(other, row, column);
                const same = there.thread === thread ? "the same lane" : who(there.thread);
                element += `, ${other.name}[${row}, ${column}] in ${other.words[there.value]} of ${same}`;
            }
        }
        return `${element}.`;
    }

    function whatIsHeld() {
        const { grid, thread } = chosen;
        const [warp, lane] = [Math.floor(thread / WARP), thread % WARP];
        const name = view.threads > WARP ? `Thread ${thread}, lane ${lane} of warp ${warp},` : `Lane ${lane}`;
        const address = grid.addresses?.[thread];
        const gives = address ? `gives the address of ${grid.name}[${address[0]}, ${address[1]}–${address[1] + 7}] and ` : "";
        const held = view.grids.flatMap((each) => pairs(each, thread));
        return [
            `${name} has g = ${Math.floor(lane / 4)} and t = ${lane % 4}; it ${gives}holds `,
            ...held.flatMap((pair, n) => [worklog.element("span", {}, pair), n < held.length - 1 ? "; " : "."]),
        ];
    }

    // "a0: A[1, 2–3]" and so on.
    function pairs(grid, thread) {
        const all = elements(grid, thread);
        return d3
            .range(0, all.length, 2)
            .map((n) => {
                const [[row, column], [lastRow, lastColumn]] = [all[n], all[n + 1]];
                const names = grid.cells[n] === grid.cells[n + 1] ? grid.cells[n] : `${grid.words[n]}, ${grid.words[n + 1]}`;
                const range = (first, last) => (first === last ? first : `${first}–${last}`);
                return `${names}: ${grid.name}[${range(row, lastRow)}, ${range(column, lastColumn)}]`;
            });
    }

    // A warp's rows of a grid.
    function board(grid, firstRow) {
        const edge = EDGE + (grid.addresses ? ADDRESS : 0);
        const tiles = grid.cells[0].startsWith("["); // each 8 columns are registers of their own
        const top = TOP + (tiles ? TOP : 0);
        const x = (column) => edge + column * WIDTH, y = (row) => top + (row - firstRow) * HEIGHT;
        const rows = d3.range(firstRow, firstRow + ROWS);
        const svg = d3
            .create("svg")
            .attr("width", x(grid.columns) + (grid.addresses ? ADDRESS : 2))
            .attr("height", y(firstRow + ROWS) + 2)
            .attr("role", "img")
            .attr("aria-label", `${grid.name}, rows ${firstRow} to ${firstRow + ROWS - 1}: the thread that holds each element`);
        const label = (left, middle, text, kind) => svg.append("text").attr("class", kind).attr("x", left).attr("y", middle).text(text);
        for (const row of rows) label(EDGE - 7, y(row) + HEIGHT / 2, row, "aside at");
        for (const column of d3.range(grid.columns)) label(x(column + 0.5), top - TOP / 2, column, "aside");
        for (const column of tiles ? d3.range(0, grid.columns, 8) : []) {
            label(x(column + 4), TOP / 2, grid.words[holder(grid, firstRow, column).value].replace(/\[\d\]$/, ""));
        }
        const cells = d3.cross(rows, d3.range(grid.columns)).map(([row, column]) => ({ row, column, ...holder(grid, row, column) }));
        const cell = svg
            .selectAll("g")
            .data(cells)
            .join("g")
            .attr("class", "cell")
            .attr("transform", (each) => `translate(${x(each.column)},${y(each.row)})`);
        cell.append("rect")
            .attr("width", WIDTH - 1)
            .attr("height", HEIGHT - 1)
            .attr("fill", (each) => `var(--tint${grid.colors[each.value]})`);
        const text = cell.append("text").attr("x", (WIDTH - 1) / 2).attr("y", (HEIGHT - 1) / 2);
        const choose = (event, each) => chooseElement(grid, each.row, each.column);
        cell.on("pointerenter", choose).on("click", choose);

        const outline = (kind, columns) =>
            svg
                .append("rect")
                .attr("class", `outline ${kind}`)
                .attr("width", columns * WIDTH - 1)
                .attr("height", HEIGHT - 1);
        const givers = (grid.addresses ?? []).map(([row, column], lane) => {
            const left = column ? x(grid.columns) : EDGE - 2;
            return label(left + ADDRESS / 2, y(row) + HEIGHT / 2, column ? `← ${lane}` : `${lane} →`, "aside");
        });
        const given = grid.addresses && outline("address", 8);
        const element = outline("element", 1);
        marks.push(() => {
            const { thread, row, column } = chosen;
            cell.classed("own", (each) => each.thread === thread);
            text.text((each) => (each.thread === thread ? grid.cells[each.value] : each.thread));
            element.attr("x", x(column)).attr("y", y(row));
            element.attr("visibility", chosen.grid === grid || view.linked ? null : "hidden");
            givers.forEach((giver, lane) => giver.classed("gives", lane === thread));
            given?.attr("x", x(grid.addresses[thread][1])).attr("y", y(grid.addresses[thread][0]));
        });
        return worklog.element(
            "div",
            {},
            worklog.element("h3", {}, `${grid.name} [${grid.rows}, ${grid.columns}]`),
            worklog.element(
                "div",
                { className: "wide", tabIndex: 0, role: "region", "aria-label": `The elements of ${grid.name}` },
                svg.node(),
            ),
        );
    }
};
