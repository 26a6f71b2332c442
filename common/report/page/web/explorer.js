// The cell that has the wanted value of one key and of the others as many as can be; an earlier key
// weighs more than all later ones.
worklog.models.explorer = {
    KEYS: ["dtype", "inputs", "head_dim", "mask", "shape"],

    nearest(cells, wanted, first) {
        const { KEYS } = worklog.models.explorer;
        const keys = [first, ...KEYS.filter((key) => key !== first)].filter(Boolean);
        const score = (cell) =>
            keys.reduce((sum, key, n) => sum + (cell[key] === wanted[key]) * 2 ** (keys.length - n), 0);
        return cells.reduce((best, cell) => (score(cell) > score(best) ? cell : best));
    },
};

worklog.sections.explorer = (root, boards) => {
    const told = root.querySelector(".told");
    if (!boards.length) {
        told.textContent = "Not measured: make bench GRID=1.";
        return;
    }
    const { KEYS, nearest } = worklog.models.explorer;
    const titles = { dtype: "dtype", inputs: "inputs", head_dim: "head_dim", mask: "mask", shape: "batch × heads × N" };
    let board = boards[0];
    let cell = nearest(board.cells, fromHash() ?? { dtype: "bf16", head_dim: 128, mask: "none", shape: "4 × 16 × 4096" });

    const selects = Object.fromEntries(
        ["device", "operation", ...KEYS].map((key) => {
            const select = worklog.element("select", { name: key });
            select.addEventListener("change", () => choose(key, select.value));
            return [key, select];
        }),
    );
    root.querySelector(".controls").append(
        ...Object.entries(selects).map(([key, select]) =>
            worklog.element(
                "label",
                {},
                { device: "GPU", operation: "ladder" }[key] ?? titles[key],
                select,
            ),
        ),
    );
    const drawRates = worklog.plot(root.querySelector(".rates"), rates);
    const drawOverview = worklog.plot(root.querySelector(".overview"), overview);
    show();

    function choose(key, value) {
        if (KEYS.includes(key)) {
            const own = board.cells.find((each) => String(each[key]) === value)[key];
            cell = nearest(board.cells, { ...cell, [key]: own }, key);
        } else {
            const wanted = { device: board.device, operation: board.operation, [key]: value };
            board =
                boards.find((b) => b.device === wanted.device && b.operation === wanted.operation) ??
                boards.find((b) => b[key] === value);
            cell = nearest(board.cells, cell);
        }
        history.replaceState(null, "", `#grid=${encodeURIComponent(`${board.device}/${board.operation}/${cell.name}`)}`);
        show();
    }

    // A page opened at #grid=GPU/ladder/cell begins with that cell.
    function fromHash() {
        const [, text] = location.hash.match(/^#grid=(.+)$/) ?? [];
        const [device, operation, name] = decodeURIComponent(text ?? "").split("/");
        const found = boards.find((b) => b.device === device && b.operation === operation);
        const named = found?.cells.find((each) => each.name === name);
        if (!named) return null;
        board = found;
        root.scrollIntoView();
        return named;
    }

    function show() {
        fill("device", [...new Set(boards.map((each) => each.device))], board.device);
        fill("operation", [...new Set(boards.map((each) => each.operation))], board.operation);
        for (const key of KEYS) {
            const values = [...new Set(board.cells.map((each) => each[key]))];
            fill(key, key === "head_dim" ? values.sort((a, b) => a - b) : values, cell[key]);
        }
        told.textContent = sentence();
        drawRates();
        drawOverview();
    }

    function fill(key, values, chosen) {
        selects[key].replaceChildren(
            ...values.map((value) => worklog.element("option", { value, selected: value === chosen }, String(value))),
        );
    }

    function sentence() {
        const peers = board.candidates.filter((each) => each.peer && each.name in cell.tflops);
        const fastest = d3.greatest(peers, (each) => cell.tflops[each.name]);
        const step = board.taken.find((name) => name in cell.tflops);
        if (!step) return "No step that attention() takes was measured here.";
        let text = `attention() takes ${step}: ${cell.tflops[step]} TFLOP/s`;
        if (fastest) text += `, ${cell.ratio.toFixed(3)} × the fastest peer, ${fastest.name}`;
        const { taken, peer } = board.repeating ?? { taken: [] };
        const repeating = taken.find((name) => name in cell.tflops);
        if (repeating && peer in cell.tflops) {
            const ratio = cell.tflops[repeating] / cell.tflops[peer];
            text += `. With deterministic=True ${repeating}: ${ratio.toFixed(3)} × ${peer}`;
        }
        return `${text}.`;
    }

    function rates(width) {
        const shown = board.candidates
            .filter((each) => each.name in cell.tflops)
            .map((each) => ({ ...each, tflops: cell.tflops[each.name] }));
        const missing = board.candidates.filter((each) => !(each.name in cell.tflops));
        const step = board.taken.find((name) => name in cell.tflops);
        const color = (each) =>
            each.name === step ? "var(--accent)" : each.peer ? "var(--mark1)" : "var(--ramp4)";
        const narrow = width < 500;
        return {
            label: `TFLOP/s of ${shown.map((each) => `${each.label} ${each.tflops}`).join(", ")}`,
            height: 22 * shown.length + 50,
            marginLeft: narrow ? 120 : 200,
            marginRight: 44,
            x: { label: "TFLOP/s", domain: [0, Math.max(board.ceiling, ...shown.map((each) => each.tflops))] },
            y: { domain: shown.map((each) => each.label), label: null, tickFormat: (name) => (narrow ? name.replace("flash_attention_3", "FA3") : name) },
            caption: missing.length
                ? `Not measured here: ${missing.map((each) => each.label).join(", ")}.`
                : undefined,
            marks: [
                Plot.ruleX([board.ceiling], { stroke: "var(--muted)", strokeDasharray: "3 3" }),
                Plot.barX(shown, { x: "tflops", y: "label", fill: color, insetTop: 2, insetBottom: 2 }),
                Plot.text(shown, { x: "tflops", y: "label", text: (d) => `${d.tflops}`, textAnchor: "start", dx: 5, stroke: "var(--page)", fill: "var(--ink)" }),
            ],
        };
    }

    function overview(width) {
        const cells = board.cells.filter((each) => each.ratio);
        const row = (each) => `D ${each.head_dim}, ${each.dtype}, ${each.shape}`;
        const rows = [...new Set(d3.sort(cells, (each) => each.head_dim).map(row))];
        const narrow = width < 500;
        const marks = {
            x: "ratio",
            y: row,
            symbol: (each) => (each.mask === "causal" ? "triangle" : "circle"),
            r: (each) => (each === cell ? 8 : 4),
            fill: (each) => (each === cell ? "var(--accent)" : "var(--ramp6)"),
        };
        return {
            label: `Ratio to the fastest peer in ${cells.length} cells, from ${d3.min(cells, (each) => each.ratio).toFixed(3)} to ${d3.max(cells, (each) => each.ratio).toFixed(3)}`,
            height: 16 * rows.length + 60,
            marginLeft: narrow ? 170 : 270,
            r: { type: "identity" },
            symbol: { domain: ["circle", "triangle"], range: ["circle", "triangle"] },
            x: { label: "over the fastest peer; triangles: causal", grid: true, nice: true },
            y: { domain: rows, label: null },
            onChoose(chosen) {
                cell = chosen;
                choose("dtype", cell.dtype);
            },
            marks: [
                Plot.ruleX([1], { stroke: "var(--ink)" }),
                Plot.dot(cells, marks),
                worklog.tip(cells, { x: "ratio", y: row, title: (each) => `${each.name}: ${each.ratio.toFixed(3)} ×` }),
            ],
        };
    }
};
