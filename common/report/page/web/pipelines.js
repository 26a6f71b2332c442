// Boxes and needs are packed as common/report/page/pipelines.py says.
worklog.models.pipelines = {
    read(step) {
        const boxes = step.rows.map((row, r) => {
            let start = 0;
            return row.boxes.map(([kind, tile, later, clocks, queued = 0], index) => {
                start += later;
                return { ...step.kinds[kind], kind, tile, start, end: start + clocks, issued: start - queued, row: r, index };
            });
        });
        const inRecord = (tile) => (tile - step.firstTile + step.tiles) % step.tiles;
        const byTile = boxes.map((row) => new Map(row.map((box) => [`${box.kind} ${inRecord(box.tile)}`, box])));

        // What a box waited for, as far as it was recorded, the last first.
        const needs = (box) => {
            const { needs: ofRow, inOrder } = step.rows[box.row];
            const met = ofRow
                .filter(([kind]) => kind === box.kind)
                .map(([, why, row, kind, back, started]) => {
                    const other = byTile[row].get(`${kind} ${inRecord(box.tile) - back}`);
                    return { why: step.whys[why], box: other, started: Boolean(started) };
                });
            if (inOrder) {
                met.push({ why: step.order, box: boxes[box.row][box.index - 1], started: box.issued === box.start });
            }
            return met
                .filter((need) => need.box)
                .map((need) => ({ ...need, clock: need.started ? need.box.issued : need.box.end }))
                .sort((a, b) => b.clock - a.clock);
        };
        // Copies overlap: they take turns on two lines.
        const lines = step.rows.map((row) => (row.who === "producer" ? 2 : 1));
        // From when on a box's line was free.
        const free = (box) => boxes[box.row][box.index - lines[box.row]]?.end ?? null;
        return { ...step, boxes, needs, lines, free };
    },

    // What a row does at a clock: the boxes that it is in, and the next one.
    at(boxes, clock) {
        return {
            now: boxes.filter((box) => box.start <= clock && clock < box.end),
            next: boxes.find((box) => box.start > clock) ?? null,
        };
    },

    // The box of a row's line at a clock, or the one that the line waits for, or else the last.
    nearest(boxes, lines, line, clock) {
        const ofLine = boxes.filter((box) => box.index % lines === line);
        return ofLine.find((box) => clock < box.end) ?? ofLine.at(-1) ?? null;
    },

    // The clocks at which something begins or ends, in order.
    events(pipelines) {
        const all = pipelines.flatMap(({ boxes }) => boxes.flat().flatMap((box) => [box.start, box.end]));
        return d3.sort(new Set(all));
    },
};

worklog.sections.pipelines = (root, data) => {
    if (!data?.length) {
        root.querySelector(".wide").remove();
        root.querySelector(".pointed").textContent = "Not measured: make profile N=10.";
        return;
    }
    const model = worklog.models.pipelines;
    const all = new Map(data.map((step) => [step.step, model.read(step)]));
    const [LEFT, ROW, GAP, HEADING, AXIS] = [104, 22, 4, 26, 24];
    const STEP = 700; // milliseconds from event to event, where motion is reduced
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
    reduced.addEventListener("change", pause);

    const container = root.querySelector(".timeline");
    const svg = d3.select(container).append("svg").attr("role", "img");
    const axis = svg.append("g");
    const content = svg.append("g");
    const marks = svg.append("g");
    svg.append("marker")
        .attr("id", "pipelines-arrow")
        .attr("viewBox", "0 0 8 8")
        .attr("refX", 7)
        .attr("refY", 4)
        .attr("markerWidth", 7)
        .attr("markerHeight", 7)
        .attr("orient", "auto")
        .append("path")
        .attr("d", "M0 0L8 4L0 8Z");
    const cursor = svg.append("line").attr("class", "cursor");
    let width = 0;
    let x = d3.scaleLinear();
    let tops = [];
    const now = root.querySelector(".now");
    let cells = [];

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
    svg.call(zoom).on("pointermove.nearest pointerdown.nearest", (event) => {
        if (event.type === "pointerdown" || !event.buttons) point(...d3.pointer(event, svg.node()));
    });
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
        tabulate();
        const hint = "Point at an interval, or at a gap between two, or press one in the table: here stands what it waited for.";
        root.querySelector(".pointed").replaceChildren(worklog.element("p", {}, hint));
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
                text(4, y + ROW / 2 + 4, row.title || row.who).attr("font-weight", row.title ? null : 600);
                const visible = pipeline.boxes[r].filter((box) => box.end > state.domain[0] && box.start < state.domain[1]);
                content
                    .append("line")
                    .attr("class", "idle")
                    .attr("x1", LEFT)
                    .attr("x2", width - 8)
                    .attr("y1", y + ROW / 2)
                    .attr("y2", y + ROW / 2);
                const groups = content
                    .append("g")
                    .selectAll("g")
                    .data(visible)
                    .join("g")
                    .attr("class", "box");
                groups
                    .append("rect")
                    .attr("x", (box) => clamp(box.start))
                    .attr("width", (box) => Math.max(clamp(box.end) - clamp(box.start), 0.5))
                    .attr("y", (box) => place(p, box)[0])
                    .attr("height", (box) => place(p, box)[1])
                    .attr("fill", (box) => `var(--${box.color})`);
                groups
                    .filter((box) => box.tile !== null && clamp(box.end) - clamp(box.start) > (pipeline.lines[r] > 1 ? 30 : 16))
                    .append("text")
                    .attr("x", (box) => (clamp(box.start) + clamp(box.end)) / 2)
                    .attr("y", (box) => middle(p, box) + 4)
                    .style("font-size", pipeline.lines[r] > 1 ? "9px" : null)
                    .text((box) => box.tile);
            });
        });
        cursor.attr("y1", AXIS - 4).attr("y2", height);
        placeCursor();
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

    // A box's top and height.
    function place(p, box) {
        const lines = shown()[p].lines[box.row];
        return [tops[p][box.row] + ((box.index % lines) * ROW) / lines, ROW / lines];
    }

    function middle(p, box) {
        const [top, height] = place(p, box);
        return top + height / 2;
    }

    // Chooses what is nearest to a place of the picture: an interval, or the wait before it.
    function point(left, top) {
        const rows = tops.flatMap((ofPipeline, p) => ofPipeline.map((y, r) => ({ p, r, y })));
        const { p, r, y } = d3.least(rows, (row) => Math.abs(row.y + ROW / 2 - top));
        const pipeline = shown()[p];
        const lines = pipeline.lines[r];
        const line = Math.min(Math.max(Math.floor(((top - y) * lines) / ROW), 0), lines - 1);
        const clock = x.invert(Math.max(left, LEFT));
        const box = model.nearest(pipeline.boxes[r], lines, line, clock);
        if (box) choose(p, box, clock < box.start);
    }

    // Waiting: what counts is the gap before the box.
    function choose(p, box, waiting) {
        const { chosen } = state;
        if (chosen && chosen.box === box && chosen.waiting === waiting) return;
        state.chosen = { p, box, waiting };
        explain(shown()[p], box, waiting);
        mark();
    }

    function titled(box) {
        return box.tile === null ? box.what : `${box.what} of tile ${box.tile}`;
    }

    function whose(pipeline, box) {
        return `${titled(box)} of ${pipeline.rows[box.row].who}`;
    }

    function explain(pipeline, box, waiting) {
        const { who } = pipeline.rows[box.row];
        const free = pipeline.free(box);
        const parts = [];
        if (box.tile === null) {
            parts.push(`${pipeline.step}, ${who}: ${waiting ? "idle" : "busy"}, `);
            parts.push(waiting ? `until clock ${box.start}. ` : `clock ${box.start} to ${box.end}, ${box.end - box.start} clocks. `);
            parts.push("Computed from when products were issued, not sampled.");
        } else if (waiting) {
            parts.push(`${pipeline.step}, ${who}: `);
            parts.push(free === null ? "the wait" : `a gap of ${box.start - free} clocks`);
            parts.push(` before ${titled(box)}, until clock ${box.start}.`);
        } else {
            parts.push(`${pipeline.step}, ${who}: ${titled(box)}, clock ${box.start} to ${box.end}, ${box.end - box.start} clocks.`);
            if (box.issued < box.start) parts.push(` Issued at clock ${box.issued}.`);
        }
        const needs = pipeline.needs(box).map(({ why, box: other, started, clock }, n) => {
            const event = `${whose(pipeline, other)} ${started ? (other.issued < other.start ? "issued" : "started") : "ended"}`;
            const before = box.start - clock;
            const when = before < 0 ? `${-before} clocks after it had begun` : before ? `${before} clocks before` : "at that clock";
            return worklog.element("li", { className: n ? "" : "last" }, `${why}: ${event} at clock ${clock}, ${when}`);
        });
        const told = [worklog.element("p", {}, parts.join(""))];
        if (needs.length) told.push(worklog.element("p", {}, "It needed, the last known first:"), worklog.element("ol", {}, ...needs));
        else if (box.tile !== null) told.push(worklog.element("p", {}, "What it needed lies before the first sample."));
        root.querySelector(".pointed").replaceChildren(...told);
    }

    // Outlines what is chosen and what met its last need, and joins them.
    function mark() {
        marks.selectAll("*").remove();
        const { p, box, waiting } = state.chosen ?? {};
        const pipeline = shown()[p];
        const last = pipeline?.needs(box)[0];
        content.selectAll(".box").classed("chosen", (d) => d === box && !waiting).classed("before", (d) => d === last?.box);
        content.selectAll(".chosen, .before").raise();
        if (!pipeline || !tops[p]) return;
        if (waiting) {
            const [top, height] = place(p, box);
            const from = clamp(pipeline.free(box) ?? extent()[0]);
            marks.append("rect").attr("class", "wait").attr("x", from).attr("y", top).attr("width", clamp(box.start) - from).attr("height", height);
        }
        if (!last) return;
        const [from, to] = [clamp(last.clock), clamp(box.start)];
        const other = middle(p, last.box);
        if (clamp(last.box.start) > from && last.started) {
            // Issued, and queued behind another product.
            marks.append("path").attr("class", "queued").attr("d", `M${from} ${other}H${clamp(last.box.start)}`);
        }
        if (from === to && last.box.row === box.row) return;
        marks
            .append("path")
            .attr("class", "arrow")
            .attr("marker-end", "url(#pipelines-arrow)")
            .attr("d", d3.line()([[from, other], [to, middle(p, box)]]));
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
        placeCursor();
        tell();
    }

    function placeCursor() {
        const at = clamp(state.clock);
        cursor.attr("x1", at).attr("x2", at);
    }

    // A table with a row for each line of work; its cells change only when what they say does.
    function tabulate() {
        const caption = worklog.element("caption");
        const rows = shown().flatMap((pipeline, p) =>
            pipeline.rows.map((row, r) => {
                const step = shown().length > 1 ? `${pipeline.step}, ` : "";
                const cell = worklog.element("td");
                const name = `${step}${row.who}${row.title ? `: ${row.title}` : ""}`;
                return { p, r, cell, said: null, row: worklog.element("tr", {}, worklog.element("th", { scope: "row" }, name), cell) };
            }),
        );
        cells = { caption, rows };
        now.replaceChildren(worklog.element("table", {}, caption, worklog.element("tbody", {}, ...rows.map((each) => each.row))));
    }

    function tell() {
        const at = `At clock ${Math.round(state.clock)}`;
        if (cells.caption.textContent !== at) cells.caption.textContent = at;
        for (const each of cells.rows) {
            const parts = doing(each.p, each.r);
            const said = parts.map((part) => part.text ?? part).join("");
            if (said === each.said) continue;
            each.said = said;
            each.cell.replaceChildren(...parts.map((part) => part.make?.() ?? part));
        }
    }

    // What a row does at the clock: words, and buttons that explain a box.
    function doing(p, r) {
        const pipeline = shown()[p];
        const { now: running, next } = model.at(pipeline.boxes[r], state.clock);
        const named = (box, waiting) => ({
            text: titled(box),
            make: () => {
                const made = button(titled(box), () => choose(p, box, waiting));
                made.setAttribute("aria-label", `${waiting ? "wait for " : ""}${titled(box)}: what it needs`);
                return made;
            },
        });
        if (running.length && running[0].tile === null) return [`busy until clock ${running[0].end}`];
        if (running.length) return running.flatMap((box, n) => [n ? "; " : "", named(box, false), ` until clock ${box.end}`]);
        if (!next) return ["no more samples"];
        if (next.tile === null) return [`idle until clock ${next.start}`];
        const pending = pipeline.needs(next).find((need) => need.clock > state.clock && need.clock <= next.start);
        const cause = pending
            ? `waits until ${whose(pipeline, pending.box)} has ${pending.started ? "started" : "ended"}, clock ${pending.clock}; `
            : "waits for nothing that has a sample; ";
        return [cause, named(next, true), ` from clock ${next.start}`];
    }

    function jump(direction) {
        pause();
        step(direction);
    }

    // Runs through the clocks or, where motion is reduced, goes from event to event.
    function start() {
        if (state.clock >= extent()[1]) move(0);
        state.playing = true;
        play.textContent = "Pause";
        now.setAttribute("aria-live", "off"); // a screen reader could not keep up
        if (reduced.matches) return follow();
        let last = performance.now();
        const frame = (time) => {
            if (!state.playing) return;
            move(state.clock + (Math.max(time - last, 0) / 1000) * Number(speed.value));
            last = Math.max(time, last);
            if (state.clock >= extent()[1]) return pause();
            requestAnimationFrame(frame);
        };
        requestAnimationFrame(frame);
    }

    function follow() {
        if (!step(1)) return pause();
        state.timer = setTimeout(follow, STEP);
    }

    function pause() {
        clearTimeout(state.timer);
        state.playing = false;
        play.textContent = "Play";
        now.setAttribute("aria-live", "polite");
    }

    // To the next event or the one before. Whether there is one.
    function step(direction) {
        const events = model.events(shown());
        const next = direction > 0 ? events.find((clock) => clock > state.clock) : events.findLast((clock) => clock < state.clock);
        if (next !== undefined) move(next);
        return next !== undefined;
    }
};
