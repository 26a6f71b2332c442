worklog.sections.ladder = (root, data) => {
    const steps = data.steps.map((step) => step.name);
    root.dataset.current = steps[0];
    const isCurrent = (step) => step.name === root.dataset.current;

    // Of peers whose names would stand on one another only the fastest one's is shown.
    const named = [];
    for (const peer of d3.sort(data.peers, (p) => -p.tflops)) {
        if (!named.length || named.at(-1).tflops > 1.35 * peer.tflops) named.push(peer);
    }

    const redraw = worklog.plot(
        root.querySelector(".chart"),
        (width) => ({
            label:
                `TFLOP/s of ${data.steps.map((s) => `${s.name}: ${s.tflops.toPrecision(3)}`).join(", ")}; ` +
                data.peers.map((p) => `${p.name}: ${p.tflops.toPrecision(3)}`).join(", "),
            height: matchMedia("(min-width: 64rem)").matches ? 320 : 150, // beside the steps, or above them
            marginLeft: 36,
            x: { domain: steps, label: null },
            y: { type: "log", label: "TFLOP/s", grid: true, ticks: 4, tickFormat: "~g" },
            marks: [
                Plot.ruleY(data.peers, { y: "tflops", stroke: "var(--mark0)", strokeOpacity: 0.7 }),
                Plot.text(named, {
                    y: "tflops",
                    text: "name",
                    frameAnchor: "left",
                    textAnchor: "start",
                    dx: 4,
                    dy: -6,
                    fill: "var(--ink)",
                    stroke: "var(--page)",
                }),
                Plot.lineY(data.steps, { x: "name", y: "tflops", stroke: "var(--ramp5)" }),
                Plot.dot(data.steps, {
                    x: "name",
                    y: "tflops",
                    r: (step) => (isCurrent(step) ? 7 : 4),
                    fill: (step) => (isCurrent(step) ? "var(--accent)" : "var(--ramp7)"),
                }),
                worklog.tip([...data.steps, ...data.peers.map((p) => ({ ...p, peer: true }))], {
                    x: (d) => (d.peer ? steps[0] : d.name),
                    y: "tflops",
                    title: (d) => `${d.name}: ${d.tflops.toPrecision(4)} TFLOP/s`,
                }),
            ],
        }),
    );

    // The step whose article crosses the upper third of the screen is the current one.
    const watcher = new IntersectionObserver(
        (entries) => {
            const entered = entries.find((entry) => entry.isIntersecting);
            if (!entered) return;
            root.dataset.current = entered.target.dataset.step;
            redraw();
        },
        { rootMargin: "-33% 0px -66% 0px" },
    );
    for (const article of root.querySelectorAll(".step")) {
        watcher.observe(article);
        const step = data.steps.find((each) => each.name === article.dataset.step);
        if (step?.limits) drawLimits(article.querySelector(".limits"), step);
        const listing = article.querySelector("details.listing");
        listing.addEventListener("toggle", () => highlight(listing.querySelector("pre")), {
            once: true,
        });
    }

    function drawLimits(container, step) {
        const bars = Object.entries(step.limits).map(([limit, share]) => ({ limit, share }));
        const highest = Math.max(...bars.map((bar) => bar.share));
        const of = step.kernel ? `${step.name}, ${step.kernel}` : step.name;
        worklog.plot(
            container,
            () => ({
                label: `Limits of ${of}: ${bars.map((b) => `${b.limit} ${b.share.toFixed(0)} %`).join(", ")}`,
                height: 26 * bars.length + 30,
                marginLeft: 60,
                marginRight: 40,
                x: { domain: [0, 100], label: `% of the peak${step.kernel ? `, ${step.kernel}` : ""}` },
                y: { domain: bars.map((bar) => bar.limit), label: null },
                marks: [
                    Plot.barX(bars, {
                        x: "share",
                        y: "limit",
                        insetTop: 2,
                        insetBottom: 2,
                        fill: (bar) => (bar.share === highest ? "var(--accent)" : "var(--ramp3)"),
                    }),
                    Plot.text(bars, {
                        x: "share",
                        y: "limit",
                        text: (bar) => bar.share.toFixed(0),
                        textAnchor: "start",
                        dx: 5,
                    }),
                ],
            }),
        );
    }

    // Colors the lines of a listing when it is opened: all of them at once would delay the page.
    function highlight(pre) {
        const isDiff = pre.className === "diff";
        const lines = pre.textContent.split("\n").map((line) => {
            const sign = isDiff ? line.slice(0, 1) : "";
            if (sign === "@") return worklog.element("span", { className: "hunk" }, line);
            const code = worklog.element("span", {
                className: { "+": "added", "-": "removed" }[sign] ?? "kept",
            });
            code.innerHTML = Prism.highlight(line.slice(sign.length), Prism.languages.cpp, "cpp");
            code.prepend(sign);
            return code;
        });
        pre.replaceChildren(...lines);
    }
};
