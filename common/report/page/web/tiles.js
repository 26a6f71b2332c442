// What each SM computes one after another: pieces of {head, own, tiles}, where own is the tile that
// the block keeps, of queries in forward, of keys in backward, and tiles are those that it walks.
worklog.models.tiles = {
    // In the order of the grid. The last query sees the last key.
    works({ backward, causal, queries, keys, heads }) {
        const before = keys - queries;
        return d3.range(heads).flatMap((head) =>
            d3.range(backward ? keys : queries).map((own) => ({
                head,
                own,
                tiles: backward
                    ? d3.range(causal ? Math.max(own - before, 0) : 0, queries)
                    : d3.range(causal ? Math.max(Math.min(own + before + 1, keys), 0) : keys),
            })),
        );
    },

    byFreeSm(works, sms) {
        const taken = d3.range(sms).map(() => []);
        const tiles = (pieces) => d3.sum(pieces, (piece) => piece.tiles.length);
        for (const work of works) taken[d3.leastIndex(taken, (a, b) => tiles(a) - tiles(b))].push(work);
        return taken;
    },

    // v10: sorted by length within sections of whole heads, downwards in every other section.
    sorted(works, { causal, queries, heads, sms }) {
        let sectionHeads;
        for (let rounds = 1; rounds <= 4; ++rounds) {
            sectionHeads = Math.max(1, Math.floor((rounds * sms) / queries));
            if (10 * sectionHeads * queries >= 9 * rounds * sms) break;
        }
        const at = (i) => {
            if (!causal) return works[i];
            const section = Math.floor(i / queries / sectionHeads);
            const first = section * sectionHeads;
            const inSection = i - first * queries;
            const count = Math.min(sectionHeads, heads - first);
            const downwards = (Math.floor((heads - 1) / sectionHeads) - section) % 2 === 0;
            const block = Math.floor(inSection / count);
            return works[(first + (inSection % count)) * queries + (downwards ? queries - 1 - block : block)];
        };
        return d3.range(sms).map((sm) => d3.range(sm, works.length, sms).map(at));
    },

    // v12 without a mask: shares that end within a work tile, whose rest the next block computes, last.
    shares(works, { keys, sms }, { maxBlocks, minSavedTiles }) {
        const rounds = Math.floor(works.length / sms);
        const left = works.length % sms;
        const inRounds = d3.range(sms).map((sm) => d3.range(sm, works.length, sms).map((i) => works[i]));
        const saved = (sms - left) * keys;
        if (left === 0 || sms > maxBlocks || saved < minSavedTiles * sms || rounds === 0) return inRounds;
        const cut = (sm) => {
            const share = sm * (sms + left);
            return [(rounds - 1) * sms + Math.floor(share / sms), Math.floor((keys * (share % sms)) / sms)];
        };
        const part = (i, from, to) => ({ ...works[i], tiles: d3.range(from, to) });
        return d3.range(sms).map((sm) => {
            const [[firstWork, firstTile], [endWork, endTile]] = [cut(sm), cut(sm + 1)];
            const pieces = d3.range(rounds - 1).map((n) => works[sm + n * sms]);
            if (endTile) pieces.push(part(endWork, 0, endTile));
            for (let i = endWork - 1; i >= firstWork; --i) pieces.push(works[i]);
            if (firstTile) pieces[pieces.length - 1] = part(firstWork, firstTile, keys);
            return pieces;
        });
    },

    // b08 with a causal mask: the longest first; once around the tiles, the later works upward.
    longestFirst(works, { keys, sms }) {
        const around = ({ own, tiles }) => {
            const walked = own < keys / 2 ? tiles.toReversed() : tiles;
            const start = own % walked.length;
            return [...walked.slice(start), ...walked.slice(0, start)];
        };
        const sorted = d3.sort(works, (work) => work.own);
        return this.byFreeSm(sorted.map((work) => ({ ...work, tiles: around(work) })), sms);
    },

    // When each tile is computed: [sm, head, query, key, time].
    times(taken, backward) {
        return taken.flatMap((pieces, sm) => {
            let time = 0;
            return pieces.flatMap(({ head, own, tiles }) =>
                tiles.map((tile) => ({ sm, head, query: backward ? tile : own, key: backward ? own : tile, time: time++ })),
            );
        });
    },

    // b09 with a causal mask, one head, an SM for each block of keys: the last keys first, and no
    // block adds to a tile of dQ before the one in front of it in the order has.
    inOrder(works) {
        const added = [];
        return works.toReversed().flatMap(({ head, own, tiles }, sm) => {
            let time = 0;
            return tiles.map((query) => {
                const start = Math.max(time, added[query] ?? 0);
                time = added[query] = start + 1;
                return { sm, head, query, key: own, time: start };
            });
        });
    },
};

worklog.sections.tiles = (root, data) => {
    const model = worklog.models.tiles;
    const { element } = worklog;
    // What a step's schedule is drawn for here; "square" has as many queries as keys.
    const STEPS = {
        "v09: in the grid's order": { backward: false, taken: (works, o) => model.byFreeSm(works, o.sms) },
        "v10: by length, there and back": { backward: false, taken: (works, o) => model.sorted(works, o) },
        "v12: equal shares (no mask)": { backward: false, mask: "none", taken: (works, o) => model.shares(works, o, data) },
        "b06: in the grid's order": { backward: true, taken: (works, o) => model.byFreeSm(works, o.sms) },
        "b08: longest first (causal)": { backward: true, mask: "causal", square: true, taken: (works, o) => model.longestFirst(works, o) },
        "b09: in order (causal, one head)": { backward: true, mask: "causal", square: true, alone: true },
    };
    const CELL = 26;
    const select = (name, options) =>
        element("select", { name }, ...options.map((text) => element("option", { value: text }, text)));
    const count = (name, value, max) => element("input", { type: "number", name, value, min: 1, max });
    const step = select("step", Object.keys(STEPS));
    const mask = select("mask", ["causal", "none"]);
    const [queries, keys, heads, sms] = [count("queries", 6, 10), count("keys", 6, 10), count("heads", 4, 4), count("sms", 6, 8)];
    const time = element("input", { type: "range", min: 0, value: 0, step: 1, "aria-label": "Time" });
    const button = (text, by) => {
        const made = element("button", { type: "button" }, text);
        made.addEventListener("click", () => {
            time.value = Number(time.value) + by;
            show();
        });
        return made;
    };
    root.querySelector(".controls").append(
        element("label", {}, "step", step),
        element("label", {}, "mask", mask),
        element("label", {}, "tiles of queries", queries),
        element("label", {}, "of keys", keys),
        element("label", {}, "heads", heads),
        element("label", {}, "SMs", sms),
        button("Back", -1),
        button("Next", 1),
        element("span", { className: "time" }, time),
    );
    for (const control of [step, mask, queries, keys, heads, sms]) {
        control.addEventListener("input", () => {
            time.max = 1000;
            time.value = 1000; // all of it
            show();
        });
    }
    time.addEventListener("input", show);
    time.max = 1000;
    time.value = 1000;
    show();

    function number(input) {
        return Math.min(Math.max(Math.floor(Number(input.value) || 1), 1), Number(input.max));
    }

    function schedule() {
        const chosen = STEPS[step.value];
        if (chosen.mask) mask.value = chosen.mask;
        mask.disabled = Boolean(chosen.mask);
        if (chosen.square) keys.value = number(queries);
        keys.disabled = Boolean(chosen.square);
        heads.disabled = sms.disabled = Boolean(chosen.alone);
        const options = {
            backward: chosen.backward,
            causal: mask.value === "causal",
            queries: number(queries),
            keys: number(keys),
            heads: chosen.alone ? 1 : number(heads),
            sms: chosen.alone ? number(queries) : number(sms),
        };
        const works = model.works(options);
        const times = chosen.alone ? model.inOrder(works) : model.times(chosen.taken(works, options), options.backward);
        return { options, times };
    }

    function show() {
        const { options, times } = schedule();
        const end = (d3.max(times, (each) => each.time) ?? -1) + 1;
        time.max = Math.max(end - 1, 0);
        const now = Number(time.value);
        time.setAttribute("aria-valuetext", `${now}`);
        const busy = d3.range(options.sms).map((sm) => times.filter((each) => each.sm === sm).length);
        const share = end ? d3.sum(busy) / (end * options.sms) : 0;
        root.querySelector(".told").textContent =
            `${times.length} tiles on ${options.sms} SMs, done after the time of ${end}: an SM has ${d3.min(busy)} to ${d3.max(busy)} ` +
            `of them and is busy for ${(100 * share).toFixed(0)} % of the time on average. Shown: time ${now}.`;
        root.querySelector(".heads").replaceChildren(...d3.range(options.heads).map((head) => drawHead(head, options, times, now)));
        root.querySelector(".sms").replaceChildren(drawSms(options, times, now, end));
    }

    function color(sm) {
        return `var(--bank${sm % 8})`;
    }

    function drawHead(head, { queries, keys }, times, now) {
        const byPlace = new Map(times.filter((each) => each.head === head).map((each) => [each.query * keys + each.key, each]));
        const cells = d3.cross(d3.range(queries), d3.range(keys)).map(([query, key]) => ({ query, key, ...byPlace.get(query * keys + key) }));
        const svg = d3
            .create("svg")
            .attr("width", keys * CELL + 2)
            .attr("height", queries * CELL + 2)
            .attr("role", "img")
            .attr("aria-label", `S of head ${head}: ${byPlace.size} of ${cells.length} tiles are computed`);
        const groups = svg
            .selectAll("g")
            .data(cells)
            .join("g")
            .attr("class", (cell) => (cell.time === now ? "now" : ""))
            .attr("transform", (cell) => `translate(${cell.key * CELL + 1},${cell.query * CELL + 1})`);
        groups
            .append("rect")
            .attr("width", CELL)
            .attr("height", CELL)
            .attr("fill", (cell) => (cell.time <= now ? color(cell.sm) : "var(--empty)"));
        groups.append("text").attr("x", CELL / 2).attr("y", CELL / 2 + 4).text((cell) => (cell.time <= now ? cell.time : ""));
        return element("figure", {}, svg.node(), element("figcaption", {}, `head ${head}`));
    }

    function drawSms({ sms, backward }, times, now, end) {
        const [left, unit, row] = [48, 20, 22];
        const svg = d3
            .create("svg")
            .attr("width", left + end * unit + 4)
            .attr("height", sms * row + 4)
            .attr("role", "img")
            .attr("aria-label", `What each of ${sms} SMs computes until time ${now}`);
        for (const sm of d3.range(sms)) {
            svg.append("text").attr("x", 20).attr("y", sm * row + 15).text(`SM ${sm}`);
        }
        const groups = svg
            .selectAll("g")
            .data(times.filter((each) => each.time <= now))
            .join("g")
            .attr("class", (each) => (each.time === now ? "now" : ""))
            .attr("transform", (each) => `translate(${left + each.time * unit},${each.sm * row + 1})`);
        groups.append("rect").attr("width", unit).attr("height", row - 2).attr("fill", (each) => color(each.sm));
        groups.append("text").attr("x", unit / 2).attr("y", 14).text((each) => (backward ? each.key : each.query));
        return element("div", {}, svg.node(), element("p", { className: "note" }, `The number: the tile of ${backward ? "keys" : "queries"} that the block keeps.`));
    }
};
