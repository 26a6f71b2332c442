// A row of S in tiles, and V likewise: what m, l and O are after each tile. O is not divided by l.
worklog.models.softmax = {
    online(tiles, values) {
        let [m, l, o] = [-Infinity, 0, 0];
        return tiles.map((s, n) => {
            const before = m;
            m = Math.max(m, ...s);
            // Where nothing has been visible yet, both are -Infinity, and nothing is to be scaled.
            const factor = before === m ? 1 : 2 ** (before - m);
            const p = s.map((one) => (one === -Infinity ? 0 : 2 ** (one - m)));
            l = l * factor + d3.sum(p);
            o = o * factor + d3.sum(p, (one, k) => one * values[n][k]);
            return { m, factor, p, l, o, event: n && m > before ? "rescaled" : "" };
        });
    },

    // limits: the dtype's headroom, the largest sum of a tile's P, and the one beyond which P is lost.
    shifted(tiles, values, { headroom, most, lost }, leastShift) {
        let m = Math.max(Math.max(...tiles[0]) + headroom, leastShift);
        let [l, o] = [0, 0];
        return tiles.map((s, n) => {
            const exponentials = () => s.map((one) => 2 ** (one - m));
            let p = exponentials();
            let factor = 1;
            let event = "";
            const sum = d3.sum(p);
            if (n && sum > lost) {
                const before = m;
                m = Math.max(m, Math.max(...s) + headroom);
                factor = 2 ** (before - m);
                p = exponentials();
                event = "S computed again";
            } else if (n && sum > most) {
                const e = Math.max(Math.floor(Math.log2(sum)) + headroom, 0);
                m += e;
                factor = 2 ** -e;
                p = p.map((one) => one * factor);
                event = `raised by ${e}`;
            }
            l = l * factor + d3.sum(p);
            o = o * factor + d3.sum(p, (one, k) => one * values[n][k]);
            return { m, factor, p, l, o, event };
        });
    },

    // O and the row's lse, in units of log2, of the state after the last tile.
    result({ m, l, o }) {
        return l === 0 ? { o: 0, lse: -Infinity } : { o: o / l, lse: m + Math.log2(l) };
    },

    // "1 3 | 5 -inf" as arrays of numbers, or a string that says what is wrong with it.
    parse(text) {
        const tiles = text.split("|").map((tile) => tile.trim().split(/[\s,]+/).filter(Boolean));
        if (tiles.some((tile) => !tile.length)) return "each tile needs a number";
        const numbers = tiles.map((tile) => tile.map((one) => (/^-inf(inity)?$/i.test(one) ? -Infinity : Number(one))));
        const wrong = tiles.flat().find((_, n) => Number.isNaN(numbers.flat()[n]) || numbers.flat()[n] === Infinity);
        return wrong === undefined ? numbers : `“${wrong}” is no finite number and not -inf`;
    },
};

worklog.sections.softmax = (root, data) => {
    const model = worklog.models.softmax;
    const { element } = worklog;
    const option = (value) => element("option", { value }, value);
    const example = element("select", {}, ...Object.keys(data.examples).map(option));
    const s = element("input", { type: "text", spellcheck: false, value: Object.values(data.examples)[0] });
    const v = element("input", { type: "text", spellcheck: false, value: data.values });
    const dtype = element("select", {}, ...Object.keys(data.limits).map(option));
    const button = (text, change) => {
        const made = element("button", { type: "button" }, text);
        made.addEventListener("click", () => {
            shown = change(shown);
            show();
        });
        return made;
    };
    let shown = 1; // tiles
    root.querySelector(".controls").append(
        element("label", {}, "example", example),
        element("label", {}, "S", s),
        element("label", {}, "V", v),
        element("label", {}, "dtype of the shift", dtype),
        button("First tile", () => 1),
        button("Next tile", (n) => n + 1),
        button("All tiles", () => Infinity),
    );
    example.addEventListener("change", () => {
        s.value = data.examples[example.value];
        shown = 1;
        show();
    });
    for (const control of [s, v, dtype]) control.addEventListener("input", show);
    show();

    function show() {
        const told = root.querySelector(".told");
        const [tiles, values] = [s, v].map((input) => model.parse(input.value));
        for (const [input, parsed] of [[s, tiles], [v, values]]) {
            input.setAttribute("aria-invalid", typeof parsed === "string");
        }
        if (typeof tiles === "string") return (told.textContent = `S: ${tiles}.`);
        if (typeof values === "string") return (told.textContent = `V: ${values}.`);
        if (values.flat().some((one) => one === -Infinity)) return (told.textContent = "V: a value cannot be -inf.");
        if (String(tiles.map((t) => t.length)) !== String(values.map((t) => t.length))) {
            return (told.textContent = "S and V need as many numbers in each tile.");
        }
        shown = Math.min(shown, tiles.length);
        const online = model.online(tiles, values);
        const shifted = model.shifted(tiles, values, data.limits[dtype.value], data.leastShift);
        table(".rescale", "With the rescale", tiles, online);
        table(".shift", `With the shift, ${dtype.value}`, tiles, shifted);
        const events = [online, shifted].map((steps) => steps.slice(0, shown).filter((step) => step.event).length);
        told.textContent =
            `After ${shown} of ${tiles.length} tiles: O and l were rescaled ${times(events[0])} with the running maximum, ` +
            `${times(events[1])} with the shift.`;
    }

    function times(count) {
        return count === 1 ? "once" : `${count} times`;
    }

    function table(where, title, tiles, steps) {
        const cell = (text, name = "td") => element(name, name === "th" ? { scope: "col" } : {}, text);
        const rows = steps.map((step, n) =>
            element(
                "tr",
                { className: n >= shown ? "hidden" : step.event ? "raised" : "" },
                element("th", { scope: "row" }, `${n}`),
                ...[tiles[n].map(number).join(" "), number(step.m), n ? number(step.factor) : "", step.p.map(number).join(" "), number(step.l), number(step.o), step.event].map((text) => cell(n < shown ? text : "")),
            ),
        );
        const { o, lse } = model.result(steps[shown - 1]);
        const last = element("tr", {}, element("th", { scope: "row" }, "O / l"), element("td", { colSpan: 7 }, `${number(o)}; log2 of the sum of 2^S: ${number(lse)}`));
        const heads = ["tile", "S", "m", "factor", "P", "l", "O", ""].map((text) => (text ? cell(text, "th") : cell("")));
        root.querySelector(where).replaceChildren(
            element(
                "div",
                { className: "wide", tabIndex: 0, role: "region", "aria-label": title },
                element("table", {}, element("caption", {}, title), element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows), element("tfoot", {}, last)),
            ),
        );
    }

    // As many digits as one can read; powers of two far from 1 as such.
    function number(x) {
        if (!Number.isFinite(x)) return `${x}`.replace("Infinity", "inf");
        const log = Math.log2(Math.abs(x));
        if (Number.isInteger(log) && Math.abs(log) > 9) return `${x < 0 ? "−" : ""}2^${log}`;
        return `${Number(x.toPrecision(5))}`;
    }
};
