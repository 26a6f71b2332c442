worklog.models.pictures = {
    // The rows and columns of a map as one list, with shares of 1.
    cells(map) {
        const whole = 10000;
        return map.flatMap((weights, row) => weights.map((weight, column) => ({ row, column, share: weight / whole })));
    },
};

worklog.sections.pictures = (root, data) => {
    const told = root.querySelector(".told");
    if (!data) {
        told.textContent = "Not recorded: make pictures on a GPU.";
        return;
    }
    const { element } = worklog;
    const outputs = { o: "O", dq: "dQ", dk: "dK", dv: "dV" };
    const select = (name, options) =>
        element("select", { name }, ...options.map(([value, text]) => element("option", { value }, text)));
    const headOf = select("head", data.heads.map((head, n) => [n, head.causal ? `${head.name}, causal` : head.name]));
    const output = select("output", Object.entries(outputs));
    const place = (name) => element("input", { type: "number", name, min: 0, max: data.cells - 1, value: 0 });
    const [row, column] = ["row", "column"].map(place);
    root.querySelector(".controls").append(
        element("label", {}, "head", headOf),
        element("label", {}, "errors of", output),
        element("label", {}, "row", row),
        element("label", {}, "column", column),
    );
    for (const control of [headOf, output, row, column]) control.addEventListener("input", show);
    const drawMap = worklog.plot(root.querySelector(".map"), map);
    const drawErrors = worklog.plot(root.querySelector(".errors"), errors);
    show();

    function head() {
        return data.heads[Number(headOf.value)];
    }

    function at(input) {
        return Math.min(Math.max(Math.floor(Number(input.value) || 0), 0), data.cells - 1);
    }

    function show() {
        const each = head().seq / data.cells;
        const share = worklog.models.pictures.cells(head().map)[at(row) * data.cells + at(column)].share;
        const group = (n) => `${n * each} to ${(n + 1) * each - 1}`;
        told.textContent =
            `Queries ${group(at(row))} give ${(100 * share).toFixed(2)} % of their weight to keys ${group(at(column))}, on average.`;
        table();
        drawMap();
        drawErrors();
    }

    function map(width) {
        const cells = worklog.models.pictures.cells(head().map);
        const most = d3.max(cells, (cell) => cell.share) || 1;
        const side = Math.min(width, 480);
        const ramp = d3.range(8).map((n) => `var(--ramp${n})`);
        const domain = d3.range(data.cells);
        const scale = { domain, label: null, ticks: [], padding: 0, round: false };
        return {
            label: `Attention map of ${head().name}: rows are queries, columns keys`,
            width: side,
            height: side,
            marginLeft: 30,
            marginRight: 2,
            marginTop: 2,
            marginBottom: 30,
            x: { ...scale, tickFormat: () => "", label: "keys →", labelAnchor: "center" },
            y: { ...scale, tickFormat: () => "", label: "queries ↓", labelAnchor: "center" },
            onChoose(cell) {
                row.value = cell.row;
                column.value = cell.column;
                show();
            },
            marks: [
                Plot.frame({ fill: "var(--empty)", stroke: "none" }),
                Plot.cell(
                    cells.filter((cell) => Math.sqrt(cell.share / most) * 9 >= 1),
                    { x: "column", y: "row", fill: (cell) => ramp[Math.min(Math.floor(Math.sqrt(cell.share / most) * 9), 8) - 1], inset: 0 },
                ),
                Plot.cell([{ row: at(row), column: at(column) }], { x: "column", y: "row", stroke: "var(--accent)", strokeWidth: 2, fill: "none" }),
                worklog.tip(cells, { x: "column", y: "row", title: (cell) => `row ${cell.row}, column ${cell.column}: ${(100 * cell.share).toFixed(2)} %`, maxRadius: 30 }),
            ],
        };
    }

    function names() {
        const [forward, backward] = data.steps;
        return { ours: output.value === "o" ? forward : backward, sdpa: "torch's sdpa" };
    }

    function errors(width) {
        const { ours, sdpa } = names();
        const each = head().seq / data.cells;
        const points = Object.entries({ sdpa, ours }).flatMap(([who, name]) =>
            head().errors[output.value][who].groups.map((error, n) => ({ name, who, position: (n + 0.5) * each, error })),
        );
        const ends = ["sdpa", "ours"].map((who) => points.findLast((p) => p.who === who));
        const what = ["o", "dq"].includes(output.value) ? "queries" : "keys";
        const lines = { x: "position", y: "error", z: "name" };
        const color = (p) => (p.who === "ours" ? "var(--ramp7)" : "var(--mark0)");
        return {
            label: `Error of ${outputs[output.value]} over the positions of the ${what}: ${names().ours} up to ${d3.max(points.filter((p) => p.who === "ours"), (p) => p.error)}, torch up to ${d3.max(points.filter((p) => p.who === "sdpa"), (p) => p.error)}`,
            height: 300,
            marginLeft: 60,
            marginRight: 80,
            x: { label: `position of the ${what}`, domain: [0, head().seq] },
            y: { label: `error of ${outputs[output.value]} over its root mean square`, grid: true, tickFormat: "~e", domain: [0, d3.max(points, (p) => p.error)], nice: true },
            marks: [
                Plot.line(points, { ...lines, stroke: color, strokeWidth: 1.5 }),
                // Lines may end at the same height: their names stand above and below it.
                ...d3.sort(ends, (p) => -p.error).map((end, n) =>
                    Plot.text([end], { ...lines, text: "name", textAnchor: "start", dx: 5, dy: n === 0 ? -6 : 6, fill: "var(--ink)" }),
                ),
                worklog.tip(points, { ...lines, title: (p) => `${p.name}, position ${p.position}: ${p.error}` }),
            ],
        };
    }

    function table() {
        const [forward, backward] = data.steps;
        const keys = ["median", "maximum", "nrmse"];
        const heads = ["", ...keys.flatMap((key) => [`${key}, step`, "torch"])].map((text) => element("th", { scope: "col" }, text));
        const rows = Object.entries(outputs).map(([key, title]) =>
            element(
                "tr",
                {},
                element("th", { scope: "row" }, `${title} (${key === "o" ? forward : backward})`),
                ...keys.flatMap((measure) => ["ours", "sdpa"].map((who) => element("td", {}, head().errors[key][who][measure].toExponential(2)))),
            ),
        );
        root.querySelector(".numbers-of").replaceChildren(
            element("table", {}, element("caption", {}, `${head().name}: errors from float64, ${data.dtype} on the ${data.device}`), element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)),
        );
    }
};
