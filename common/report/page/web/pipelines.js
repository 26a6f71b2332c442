// A box is [kind, tile, start, clocks, row and index of the one that it came after].
worklog.models.pipelines = {
    read(step) {
        const boxes = step.rows.map((row, r) =>
            row.boxes.map(([kind, tile, start, clocks, afterRow, after], index) => ({
                ...step.kinds[kind], tile, start, end: start + clocks, row: r, index, afterRow, after,
            })),
        );
        const before = (box) => (box.after === undefined ? null : boxes[box.afterRow][box.after]);
        return { ...step, boxes, before };
    },

    // What a row does at a clock: the boxes that it is in, and the next one.
    at(boxes, clock) {
        return {
            now: boxes.filter((box) => box.start <= clock && clock < box.end),
            next: boxes.find((box) => box.start > clock) ?? null,
        };
    },

    // The clocks at which something begins or ends, in order.
    events(pipelines) {
        const all = pipelines.flatMap(({ boxes }) => boxes.flat().flatMap((box) => [box.start, box.end]));
        return d3.sort(new Set(all));
    },
};

worklog.sections.pipelines = (root, data) => {
    if (!data.length) {
        root.querySelector(".pointed").textContent = "Not measured: make profile N=10.";
        return;
    }
    const model = worklog.models.pipelines;
    const all = new Map(data.map((step) => [step.step, model.read(step)]));
    const [LEFT, ROW, GAP, HEADING, AXIS] = [104, 22, 4, 26, 24];
    const reduced = matchMedia("(prefers-reduced-motion: reduce)");
    const state = { clock: 0, domain: null, chosen: null, playing: false };

    const select = (name, options) =>
        worklog.element("select", { name }, ...options.map(([value, text]) => worklog.element("option", { value }, text)));
    const steps = [...all.values()].map((step) => [step.step, step.label]);
    const first = select("first", steps);
    const second = select("second", [["", "none"], ...steps]);
    const speed = select("speed", [["300", "300 clocks a second"], ["1200", "1200 clocks a second"], ["5000", "5000 clocks a second"]]);
    const button = (text, action) => {
        const made = worklog.element("button", { type: "button" }, text);
        made.addEventListener("click", action);
        return made;
    };
    const play = button("Play", () => (state.playing ? pause() : start()));
    const scrub = worklog.element("input", { type: "range", step: "any", "aria-label": "Clock" });
    const labelled = (text, control) => worklog.element("label", {}, text, control);
    root.querySelector(".controls").append(
        labelled("step", first),
        labelled("beside", second),
        play,
        labelled("at", speed),
        button("Previous event", () => jump(-1)),
        button("Next event", () => jump(1)),
        button("Zoom in", () => zoomBy(2)),
        button("Zoom out", () => zoomBy(1 / 2)),
        button("All", () => show(extent())),
        worklog.element("span", { className: "scrub" }, scrub),
    );
    first.value = all.has("v10") ? "v10" : steps[0][0];
    first.addEventListener("change", reset);
    second.addEventListener("change", reset);
    scrub.addEventListener("input", () => {
        pause();
        move(Number(scrub.value));
    });
    reduced.addEventListener("change", () => {
        pause();
        play.hidden = reduced.matches; // then the events are stepped through
    });
    play.hidden = reduced.matches;

    const container = root.querySelector(".timeline");
    const svg = d3.select(container).append("svg").attr("role", "img");
    const axis = svg.append("g");
    const content = svg.append("g");
    const arrow = svg.append("path").attr("class", "arrow");
    const cursor = svg.append("line").attr("class", "cursor");
    let width = 0;
    let x = d3.scaleLinear();
    let tops = [];

    const zoom = d3
        .zoom()
        .filter((event) => {
            if (event.type === "wheel") return event.ctrlKey;
            if (event.type.startsWith("touch")) return event.touches.length > 1;
            return !event.button;
        })
        .on("zoom", ({ transform, sourceEvent }) => {
            if (sourceEvent) show(transform.rescaleX(base()).domain(), false);
        });
    svg.call(zoom);
    new ResizeObserver(() => {
        width = container.clientWidth;
        if (width) draw();
    }).observe(container);
    reset();

    function shown() {
        return [all.get(first.value), all.get(second.value)].filter(Boolean);
    }

    function extent() {
        const boxes = shown().flatMap((pipeline) => pipeline.boxes.flat());
        return [d3.min(boxes, (box) => box.start), d3.max(boxes, (box) => box.end)];
    }

    function base() {
        return d3.scaleLinear(extent(), [LEFT, width - 8]);
    }

    function reset() {
        pause();
        state.chosen = null;
        const [low, high] = extent();
        Object.assign(scrub, { min: low, max: high });
        state.domain = [0, d3.max(shown(), (pipeline) => pipeline.shown)];
        legend();
        move(0);
        draw();
    }

    // Shows these clocks, no more than there are.
    function show([from, to], tellZoom = true) {
        const [low, high] = extent();
        const clocks = Math.min(Math.max(to - from, 100), high - low);
        const begin = Math.min(Math.max(from, low), high - clocks);
        state.domain = [begin, begin + clocks];
        draw(tellZoom);
    }

    function zoomBy(factor) {
        const [from, to] = state.domain;
        const inside = from <= state.clock && state.clock <= to;
        const middle = inside ? state.clock : (from + to) / 2;
        show([middle - (middle - from) / factor, middle + (to - middle) / factor]);
    }

    function draw(tellZoom = true) {
        if (!width) return;
        const pipelines = shown();
        x = d3.scaleLinear(state.domain, [LEFT, width - 8]);
        let top = AXIS;
        tops = pipelines.map((pipeline) => {
            const lines = [];
            pipeline.rows.forEach((row, r) => {
                const newPart = r === 0 || row.who !== pipeline.rows[r - 1].who;
                if (newPart && row.title) top += HEADING;
                lines.push(top);
                top += ROW + GAP;
            });
            top += HEADING;
            return lines;
        });
        const height = top - HEADING + 6;
        svg.attr("width", width)
            .attr("height", height)
            .attr("aria-label", `Timeline of ${pipelines.map((p) => p.label).join(" and ")}, clocks ${state.domain.map(Math.round).join(" to ")}`);
        axis.attr("transform", `translate(0,${AXIS - 4})`).call(d3.axisTop(x).ticks(width / 90)).select(".domain").attr("stroke", "var(--muted)");
        axis.selectAll("text").attr("fill", "var(--muted)");
        content.selectAll("*").remove();
        pipelines.forEach((pipeline, p) => {
            pipeline.rows.forEach((row, r) => {
                const y = tops[p][r];
                const newPart = r === 0 || row.who !== pipeline.rows[r - 1].who;
                const prefix = pipelines.length > 1 ? `${pipeline.step}: ` : "";
                if (newPart && row.title) text(4, y - HEADING / 2 + 4, prefix + row.who).attr("font-weight", 600);
                text(4, y + ROW / 2 + 4, row.title || prefix + row.who).attr("font-weight", row.title ? null : 600);
                const visible = pipeline.boxes[r].filter((box) => box.end > state.domain[0] && box.start < state.domain[1]);
                // Copies overlap: they take turns on two lines.
                const lines = row.who === "producer" ? 2 : 1;
                const groups = content
                    .append("g")
                    .selectAll("g")
                    .data(visible)
                    .join("g")
                    .attr("class", (box) => `box ${box === state.chosen?.box ? "chosen" : ""}`)
                    .on("pointerenter", (_, box) => choose(pipeline, p, box));
                groups
                    .append("rect")
                    .attr("x", (box) => clamp(box.start))
                    .attr("width", (box) => Math.max(clamp(box.end) - clamp(box.start), 0.5))
                    .attr("y", (box) => y + ((box.index % lines) * ROW) / lines)
                    .attr("height", ROW / lines)
                    .attr("fill", (box) => `var(--${box.color})`);
                groups
                    .filter((box) => box.tile !== null && clamp(box.end) - clamp(box.start) > (lines > 1 ? 30 : 16))
                    .append("text")
                    .attr("x", (box) => (clamp(box.start) + clamp(box.end)) / 2)
                    .attr("y", (box) => y + ((box.index % lines) * ROW) / lines + ROW / lines / 2 + 4)
                    .style("font-size", lines > 1 ? "9px" : null)
                    .text((box) => box.tile);
            });
        });
        cursor.attr("y1", AXIS - 4).attr("y2", height);
        place();
        mark();
        if (tellZoom) {
            const scale = (base().domain()[1] - base().domain()[0]) / (state.domain[1] - state.domain[0]);
            const transform = d3.zoomIdentity.scale(scale).translate(LEFT / scale - base()(state.domain[0]), 0);
            zoom.extent([[LEFT, 0], [width - 8, height]]).scaleExtent([1, 200]);
            svg.property("__zoom", transform);
        }
    }

    function text(at, y, words) {
        return content.append("text").attr("x", at).attr("y", y).text(words);
    }

    function clamp(clock) {
        return x(Math.min(Math.max(clock, state.domain[0]), state.domain[1]));
    }

    function legend() {
        const kinds = new Map(shown().flatMap((p) => p.kinds.map((kind) => [kind.what, kind.color])));
        root.querySelector(".keys").replaceChildren(
            ...[...kinds].map(([what, color]) => {
                const patch = worklog.element("i");
                patch.style.background = `var(--${color})`;
                return worklog.element("span", {}, patch, what);
            }),
        );
    }

    function choose(pipeline, p, box) {
        state.chosen = { pipeline, p, box };
        root.querySelector(".pointed").textContent = sentence(pipeline, box);
        mark();
    }

    function titled(box) {
        return box.tile === null ? box.what : `${box.what} of tile ${box.tile}`;
    }

    function named(pipeline, box) {
        const { who } = pipeline.rows[box.row];
        return `${titled(box)} (${who})`;
    }

    function sentence(pipeline, box) {
        const before = pipeline.before(box);
        const took = `${pipeline.step}, ${named(pipeline, box)}: clock ${box.start} to ${box.end}, ${box.end - box.start} clocks`;
        if (!before) return `${took}.`;
        const gap = box.start - before.end;
        const wait = gap ? `, ${gap} clocks after it` : ", as soon as that was done";
        return `${took}. Came after ${named(pipeline, before)}${wait}.`;
    }

    // Outlines the chosen box and the one that it came after, and joins them.
    function mark() {
        const { pipeline, p, box } = state.chosen ?? {};
        const before = box && pipeline.before(box);
        content.selectAll(".box").classed("chosen", (d) => d === box).classed("before", (d) => d === before);
        const ends = before && [
            [clamp(before.end), tops[p]?.[before.row] + ROW / 2],
            [clamp(box.start), tops[p]?.[box.row] + ROW / 2],
        ];
        arrow.attr("d", ends && ends.flat().every(Number.isFinite) ? d3.line()(ends) : null);
    }

    function move(clock) {
        const [low, high] = extent();
        state.clock = Math.min(Math.max(clock, low), high);
        scrub.value = state.clock;
        const [from, to] = state.domain;
        if (width && (state.clock < from || state.clock > to)) {
            const clocks = to - from;
            show([state.clock - 0.1 * clocks, state.clock + 0.9 * clocks]);
        }
        place();
        tell();
    }

    function place() {
        const at = clamp(state.clock);
        cursor.attr("x1", at).attr("x2", at);
    }

    function tell() {
        const rows = shown().flatMap((pipeline) =>
            pipeline.rows.map((row, r) => {
                const { now, next } = model.at(pipeline.boxes[r], state.clock);
                const words = now.length ? now.map(during).join("; ") : next ? waiting(pipeline, next) : "done";
                return worklog.element(
                    "tr",
                    {},
                    worklog.element("th", { scope: "row" }, `${shown().length > 1 ? `${pipeline.step}, ` : ""}${row.who}${row.title ? `: ${row.title}` : ""}`),
                    worklog.element("td", {}, words),
                );
            }),
        );
        const caption = worklog.element("caption", {}, `At clock ${Math.round(state.clock)}`);
        root.querySelector(".now").replaceChildren(worklog.element("table", {}, caption, worklog.element("tbody", {}, ...rows)));
    }

    function during(box) {
        return `${titled(box)}, ${Math.round(state.clock - box.start)} clocks so far`;
    }

    function waiting(pipeline, next) {
        const before = pipeline.before(next);
        const pending = before && before.end > state.clock;
        const cause = pending ? `waits for ${named(pipeline, before)}; ` : "";
        return `${cause}${titled(next)} in ${Math.round(next.start - state.clock)} clocks`;
    }

    function jump(direction) {
        pause();
        const events = model.events(shown());
        const next = direction > 0 ? events.find((clock) => clock > state.clock) : events.findLast((clock) => clock < state.clock);
        if (next !== undefined) move(next);
    }

    function start() {
        state.playing = true;
        play.textContent = "Pause";
        let last = performance.now();
        const frame = (time) => {
            if (!state.playing) return;
            const before = state.clock;
            move(state.clock + (Math.max(time - last, 0) / 1000) * Number(speed.value));
            last = Math.max(time, last);
            if (state.clock === before && before === extent()[1]) return pause();
            requestAnimationFrame(frame);
        };
        requestAnimationFrame(frame);
    }

    function pause() {
        state.playing = false;
        play.textContent = "Play";
    }
};
