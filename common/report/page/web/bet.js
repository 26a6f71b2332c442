worklog.models.bet = {
    // The cells on normally distributed logits of one head_dim and mask, or on another kind of inputs.
    line(cells, { dtype, head_dim, causal }) {
        const found = cells.filter((c) => c.dtype === dtype && c.head_dim === head_dim && c.causal === causal && c.std);
        return d3.sort(found, (cell) => cell.std);
    },

    // The fastest of these candidates in a cell.
    fastest(cell, names) {
        return d3.greatest(names.filter((name) => name in cell.tflops), (name) => cell.tflops[name]) ?? null;
    },
};

worklog.sections.bet = (root, data) => {
    const told = root.querySelector(".told");
    if (!data) {
        told.textContent = "Not measured: make bench DIST=1.";
        return;
    }
    const model = worklog.models.bet;
    const { element } = worklog;
    const stds = d3.sort(new Set(data.cells.map((cell) => cell.std).filter(Boolean)));
    const dtypes = [...new Set(data.cells.map((cell) => cell.dtype))];
    const others = [...new Set(data.cells.filter((cell) => !cell.std).map((cell) => cell.inputs))];
    const steps = data.candidates.filter((each) => !each.peer).map((each) => each.name);
    const peers = data.candidates.filter((each) => each.peer).map((each) => each.name);
    const last = steps.at(-1);
    const select = (name, options) =>
        element("select", { name }, ...options.map(([value, text]) => element("option", { value }, text)));
    const kind = select("inputs", [["normal", "normally distributed"], ...others.map((each) => [each, each.replaceAll("_", " ")])]);
    const slider = element("input", { type: "range", min: 0, max: stds.length - 1, step: 1, value: 0, "aria-label": "Standard deviation of the logits" });
    const output = element("output");
    const headDim = select("head_dim", d3.sort(new Set(data.cells.map((cell) => cell.head_dim))).map((d) => [d, d]));
    const mask = select("mask", [["none", "none"], ["causal", "causal"]]);
    headDim.value = 128;
    root.querySelector(".controls").append(
        element("label", {}, "inputs", kind),
        element("label", {}, "logits' standard deviation", slider, output),
        element("label", {}, "head_dim", headDim),
        element("label", {}, "mask", mask),
    );
    for (const control of [kind, slider, headDim, mask]) control.addEventListener("input", show);
    const drawSpeeds = worklog.plot(root.querySelector(".speeds"), speeds);
    const drawShares = worklog.plot(root.querySelector(".shares"), shares);
    show();

    function std() {
        return stds[Number(slider.value)];
    }

    function chosen(dtype) {
        return data.cells.find(
            (cell) =>
                cell.dtype === dtype &&
                cell.head_dim === Number(headDim.value) &&
                cell.causal === (mask.value === "causal") &&
                (kind.value === "normal" ? cell.std === std() : cell.inputs === kind.value),
        );
    }

    function show() {
        const normal = kind.value === "normal";
        slider.disabled = !normal;
        output.textContent = normal ? std() : "";
        slider.setAttribute("aria-valuetext", `${std()}`);
        const cells = dtypes.map((dtype) => chosen(dtype)).filter(Boolean);
        told.textContent = cells.length ? cells.map(sentence).join(" ") : "Not measured with this head_dim and mask.";
        numbers(cells);
        drawSpeeds();
        drawShares();
    }

    function sentence(cell) {
        const peer = model.fastest(cell, peers);
        const ratio = peer && last in cell.tflops ? `, ${(cell.tflops[last] / cell.tflops[peer]).toFixed(3)} × ${peer}` : "";
        const shares = cell.redone === null ? "" : ` ${percent(cell.rescaled)} of the work tiles were rescaled, in ${percent(cell.redone)} S of a tile was computed again.`;
        return `${cell.dtype}: ${last} ${cell.tflops[last] ?? "–"} TFLOP/s${ratio}.${shares}`;
    }

    function percent(share) {
        if (share === null) return "–";
        if (share > 0 && share < 0.01) return "< 1 %";
        if (share < 1 && share > 0.99) return "> 99 %";
        return `${Math.round(100 * share)} %`;
    }

    function numbers(cells) {
        const heads = ["", ...cells.map((cell) => cell.dtype)].map((text) => element("th", { scope: "col" }, text));
        const row = (title, value) =>
            element("tr", {}, element("th", { scope: "row" }, title), ...cells.map((cell) => element("td", {}, value(cell))));
        root.querySelector(".numbers-of").replaceChildren(
            element(
                "table",
                {},
                element("caption", {}, `TFLOP/s on the ${data.device}`),
                element("thead", {}, element("tr", {}, ...heads)),
                element(
                    "tbody",
                    {},
                    ...data.candidates.map((each) => row(each.label, (cell) => `${cell.tflops[each.name] ?? "–"}`)),
                    row("rescaled", (cell) => percent(cell.rescaled)),
                    row("computed again", (cell) => percent(cell.redone)),
                ),
            ),
        );
    }

    function speeds(width) {
        const causal = mask.value === "causal";
        const names = [...steps, ...peers];
        const points = dtypes.flatMap((dtype) =>
            model.line(data.cells, { dtype, head_dim: Number(headDim.value), causal }).flatMap((cell) =>
                names.filter((name) => name in cell.tflops).map((name) => ({ dtype, name, std: cell.std, tflops: cell.tflops[name] })),
            ),
        );
        const color = (name) => (name === last ? "var(--accent)" : steps.includes(name) ? "var(--ramp5)" : "var(--mark1)");
        const lines = { x: "std", y: "tflops", z: "name" };
        const narrow = width < 600;
        const facet = narrow ? { fy: "dtype" } : { fx: "dtype" };
        return {
            label: `TFLOP/s over the logits' standard deviation: ${dtypes.map((dtype) => `${dtype} ${points.filter((p) => p.dtype === dtype && p.name === last).map((p) => `${p.std}: ${p.tflops}`).join(", ")}`).join("; ")} for ${last}`,
            height: narrow ? 520 : 340,
            marginLeft: 44,
            marginRight: 70,
            fx: { padding: 0.16, label: null },
            fy: { padding: 0.1, label: null },
            x: { type: "log", base: 2, ticks: stds, tickFormat: (d) => `${d}`, label: "standard deviation of the logits" },
            y: { label: "TFLOP/s", grid: true, nice: true },
            marks: [
                kind.value === "normal" ? Plot.ruleX([std()], { stroke: "var(--muted)", strokeDasharray: "3 3" }) : null,
                Plot.line(points, { ...lines, ...facet, stroke: (p) => color(p.name) }),
                Plot.dot(points, { ...lines, ...facet, fill: (p) => color(p.name), r: 3 }),
                Plot.text(points, Plot.selectLast({ ...lines, ...facet, text: (p) => p.name.replace("flash_attention_3", "FA3"), textAnchor: "start", dx: 6, fill: "var(--ink)" })),
                worklog.tip(points, { ...lines, ...facet, title: (p) => `${p.name}, ${p.dtype}: ${p.tflops} TFLOP/s` }),
            ],
        };
    }

    function shares(width) {
        const causal = mask.value === "causal";
        const points = dtypes.flatMap((dtype) =>
            model
                .line(data.cells, { dtype, head_dim: Number(headDim.value), causal })
                .filter((cell) => cell.rescaled !== null)
                .map((cell) => ({ dtype, std: cell.std, rescaled: 100 * cell.rescaled, redone: 100 * cell.redone })),
        );
        const at = { x: "std", y: "rescaled" };
        return {
            label: `Work tiles rescaled: ${points.map((p) => `${p.dtype} at ${p.std}: ${p.rescaled.toFixed(1)} %`).join(", ")}`,
            height: 180,
            marginLeft: 44,
            marginRight: 70,
            x: { type: "log", base: 2, ticks: stds, tickFormat: (d) => `${d}`, label: "standard deviation of the logits" },
            y: { label: "% of the work tiles rescaled", grid: true, domain: [0, 100], ticks: 5 },
            marks: [
                kind.value === "normal" ? Plot.ruleX([std()], { stroke: "var(--muted)", strokeDasharray: "3 3" }) : null,
                Plot.line(points, { ...at, z: "dtype", stroke: (p) => (p.dtype === "fp16" ? "var(--mark0)" : "var(--ramp7)") }),
                Plot.dot(points, { ...at, fill: (p) => (p.dtype === "fp16" ? "var(--mark0)" : "var(--ramp7)") }),
                // Where the two are apart.
                Plot.text(points.filter((p) => p.std === stds.at(-2)), { ...at, text: "dtype", dy: -9, fill: "var(--ink)" }),
                worklog.tip(points, { ...at, title: (p) => `${p.dtype}: ${p.rescaled.toFixed(1)} % rescaled, ${p.redone.toFixed(1)} % computed again` }),
            ],
        };
    }
};
