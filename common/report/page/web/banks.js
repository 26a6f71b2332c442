// As common/runtime/simt/banks.h counts.
worklog.models.banks = {
    BANKS: 32,
    WORD: 4, // bytes
    CHUNK: 16, // bytes: what a swizzle moves

    // Where the byte of a row lies.
    address(row, byte, pitch, { byRow, mask }) {
        const { BANKS, WORD, CHUNK } = worklog.models.banks;
        const plain = row * pitch + byte;
        const number = byRow ? row : Math.floor(plain / (BANKS * WORD));
        const flipped = (number & mask) * CHUNK;
        return byRow ? row * pitch + (byte ^ flipped) : plain ^ flipped;
    },

    // What a warp's access takes, given each lane's address or null: its phases, and the words of
    // each with their bank, the lanes that want it, and the wavefront that delivers it. No phase
    // has 0 wavefronts: one that no lane takes part in is left out.
    access(addresses, laneBytes) {
        const { BANKS, WORD } = worklog.models.banks;
        const size = (BANKS * WORD) / laneBytes;
        const phases = [];
        for (let first = 0; first < addresses.length; first += size) {
            const words = new Map();
            const wanted = Array(BANKS).fill(0); // different words of each bank
            addresses.slice(first, first + size).forEach((address, n) => {
                for (let i = 0; address !== null && i < laneBytes / WORD; ++i) {
                    const word = Math.floor(address / WORD) + i;
                    if (!words.has(word)) {
                        const bank = word % BANKS;
                        words.set(word, { word, bank, wavefront: wanted[bank]++, lanes: [] });
                    }
                    words.get(word).lanes.push(first + n);
                }
            });
            if (words.size) {
                const wavefronts = Math.max(...wanted);
                phases.push({ first, last: first + size - 1, words: [...words.values()], wanted, wavefronts });
            }
        }
        return { phases, ideal: phases.length, wavefronts: phases.reduce((sum, phase) => sum + phase.wavefronts, 0) };
    },
};

worklog.sections.banks = (root, data) => {
    const { BANKS, WORD, address, access } = worklog.models.banks;
    const LINE = BANKS * WORD;
    const WIDTH = 27, HEIGHT = 20, LEFT = 74, GAP = 7; // pixels
    const COLORS = 8;
    const told = root.querySelector(".told");
    const note = root.querySelector(".note");
    const board = root.querySelector(".wide");
    const legend = root.querySelector(".legend");

    const option = (value, title) => worklog.element("option", { value }, title);
    const select = (values) => worklog.element("select", {}, ...values.map((each) => option(each.name, each.title)));
    const number = (properties) => worklog.element("input", { type: "number", inputMode: "numeric", ...properties });
    const inputs = {
        tile: worklog.element("select", {}, option("", "a layout of your own"), ...data.tiles.map((tile, n) => option(n, tile.title))),
        pitch: number({ min: 4, max: 4096, step: 4 }),
        swizzle: select(data.swizzles),
        access: select(data.accesses),
        first: number({ min: 0, max: 1024, step: 4, value: 0 }),
        phase: worklog.element("select", {}, option("", "all")),
    };
    const titles = {
        tile: "Start from",
        pitch: "Row pitch, bytes",
        swizzle: "Swizzle",
        access: "A warp accesses",
        first: "from byte",
        phase: "Phase",
    };
    root.querySelector(".controls").append(
        ...Object.entries(inputs).map(([key, input]) => worklog.element("label", {}, titles[key], input)),
    );
    for (const [key, input] of Object.entries(inputs)) {
        input.addEventListener("input", () => {
            if (key === "tile") take(data.tiles[input.value]);
            else if (key !== "phase") inputs.tile.value = "";
            show();
        });
    }
    inputs.tile.value = data.start;
    take(data.tiles[data.start]);
    show();

    function take(tile) {
        if (!tile) return;
        for (const key of ["pitch", "swizzle", "access"]) inputs[key].value = tile[key];
        inputs.first.value = 0;
    }

    function show() {
        const chosen = data.accesses.find((each) => each.name === inputs.access.value);
        const swizzle = data.swizzles.find((each) => each.name === inputs.swizzle.value);
        const [pitch, first] = [inputs.pitch, inputs.first].map((input) => input.valueAsNumber);
        const addresses = chosen.places.map((place) => place && address(place[0], place[1] + first, pitch, swizzle));
        const problem =
            wrong(inputs.pitch, "A row pitch") ?? wrong(inputs.first, "The first byte") ?? misaligned(addresses, chosen.laneBytes);
        const found = problem ? { phases: [], ideal: 0, wavefronts: 0 } : access(addresses, chosen.laneBytes);
        const phase = choosePhase(found.phases);
        const bytes = chosen.places.map((place) => place && place[1] + first + chosen.laneBytes);
        note.textContent = problem ? "" : remarks(pitch, swizzle, Math.max(...bytes), found);
        told.replaceChildren(...(problem ? [problem] : sentence(found)));
        draw(found.phases, phase);
    }

    function wrong(input, name) {
        const { min, max, step } = input;
        return input.checkValidity() && input.value ? null : `${name} is a multiple of ${step} bytes from ${min} to ${max}.`;
    }

    function misaligned(addresses, laneBytes) {
        const lane = addresses.findIndex((each) => each % laneBytes);
        return lane < 0
            ? null
            : `Not allowed: lane ${lane} would access ${laneBytes} bytes at byte ${addresses[lane]}, which is no multiple of ${laneBytes}.`;
    }

    function choosePhase(phases) {
        const chosen = inputs.phase.value;
        inputs.phase.replaceChildren(
            option("", "all"),
            ...phases.map((phase, n) => option(n, `${n + 1}: lanes ${phase.first}–${phase.last}`)),
        );
        inputs.phase.value = chosen in phases ? chosen : "";
        return phases[inputs.phase.value];
    }

    function sentence({ phases, ideal, wavefronts }) {
        const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
        const parts = [worklog.element("b", {}, `Wavefronts: ${wavefronts}, ideal ${ideal}.`)];
        const most = Math.max(...phases.map((phase) => phase.wavefronts));
        const worst = phases.findIndex((phase) => phase.wavefronts === most);
        if (most === 1) return [...parts, ` ${count(phases.length, "phase")}: none wants two words of one bank.`];
        const words = `${most} different words of`;
        const conflicts = count(wavefronts - ideal, "conflict");
        if (phases.length > 1 && phases.every((phase) => phase.wavefronts === most)) {
            return [...parts, ` Each of the ${phases.length} phases wants ${words} one bank: ${conflicts}.`];
        }
        const bank = phases[worst].wanted.indexOf(most);
        return [...parts, ` Phase ${worst + 1} wants ${words} bank ${bank}; in all ${conflicts}.`];
    }

    // What a kernel that did this should know.
    function remarks(pitch, swizzle, end, { phases }) {
        const rows = `A pitch of ${pitch} bytes is ${pitch / 2} elements of 16 bits or ${pitch / 4} floats.`;
        const remark = [rows];
        if (end > pitch) remark.push(`The access goes to byte ${end} of a row: past its end.`);
        if (swizzle.rowBytes && (swizzle.byRow ? pitch % swizzle.rowBytes : pitch !== swizzle.rowBytes)) {
            remark.push(
                swizzle.byRow
                    ? `This swizzle needs rows of whole ${swizzle.rowBytes} bytes: here a chunk can leave its row.`
                    : `TMA writes rows of ${swizzle.rowBytes} bytes with this swizzle.`,
            );
        }
        if (phases.length > 1) remark.push(`Phases: ${phases.map((each) => each.wavefronts).join(" + ")} wavefronts.`);
        return remark.join(" ");
    }

    // A row for each 128 bytes that a lane accesses, and one for the words that each bank delivers
    // in the phase that wants most of it.
    function draw(phases, only) {
        const words = phases.flatMap((phase) => phase.words.map((each) => ({ ...each, phase })));
        const cells = [...d3.group(words, (each) => each.word).values()].map((same) => ({
            word: same[0].word,
            bank: same[0].bank,
            line: Math.floor(same[0].word / BANKS),
            lanes: [...new Set(same.flatMap((each) => each.lanes))],
            color: d3.max(same, (each) => each.wavefront) % COLORS,
            faded: only && !same.some((each) => each.phase === only),
            title: same
                .map((each) => `${span(each.lanes)}: wavefront ${each.wavefront + 1} of phase ${phases.indexOf(each.phase) + 1}`)
                .join("\n"),
        }));
        const lines = d3.sort(new Set(cells.map((cell) => cell.line)));
        let y = HEIGHT;
        const tops = new Map(lines.map((line, n) => [line, (y += n ? HEIGHT + GAP * (line > lines[n - 1] + 1) : 0)]));
        const bottom = (y += HEIGHT + GAP) + HEIGHT;
        const svg = d3
            .create("svg")
            .attr("width", LEFT + BANKS * WIDTH)
            .attr("height", phases.length ? bottom : 0)
            .attr("role", "img")
            .attr("aria-label", `${lines.length} lines of 128 bytes and the lanes that access their words, in 32 banks`);
        const label = (x, top, text, kind) =>
            svg.append("text").attr("class", kind).attr("x", x).attr("y", top + HEIGHT / 2).text(text);
        label(LEFT - 8, 0, "bank", "aside at");
        label(LEFT - 8, y, "most words", "aside at");
        for (const [line, top] of tops) label(LEFT - 8, top, `byte ${line * LINE}`, "aside at");
        for (const bank of d3.range(BANKS)) label(LEFT + (bank + 0.5) * WIDTH, 0, bank, "aside");

        const box = (selection) => selection.append("rect").attr("width", WIDTH - 1).attr("height", HEIGHT - 1);
        const place = (group) => group.attr("transform", ({ x, top }) => `translate(${x},${top})`);
        const middle = (selection) => selection.attr("x", (WIDTH - 1) / 2).attr("y", (HEIGHT - 1) / 2);
        const at = (bank) => LEFT + bank * WIDTH;
        const empty = d3.cross(lines, d3.range(BANKS)).map(([line, bank]) => ({ x: at(bank), top: tops.get(line) }));
        box(svg.selectAll("g.empty").data(empty).join("g").attr("class", "empty").call(place)).attr("fill", "var(--empty)");

        const hits = cells.map((cell) => ({ ...cell, x: at(cell.bank), top: tops.get(cell.line) }));
        const hit = svg.selectAll("g.hit").data(hits).join("g").attr("class", "hit").call(place);
        box(hit).attr("fill", (cell) => `var(--bank${cell.color})`).attr("opacity", (cell) => (cell.faded ? 0.3 : null));
        middle(hit.append("text")).attr("class", (cell) => (cell.faded ? "aside" : null)).text((cell) => short(cell.lanes));
        hit.append("title").text((cell) => cell.title);

        const shown = only ? [only] : phases;
        const most = d3.max(shown, (phase) => phase.wavefronts);
        const counts = d3.range(BANKS).map((bank) => ({ x: at(bank), top: y, count: d3.max(shown, (phase) => phase.wanted[bank]) }));
        const count = svg.selectAll("g.count").data(counts).join("g").attr("class", "count").call(place);
        count.classed("most", (each) => each.count > 1 && each.count === most);
        box(count);
        middle(count.append("text")).attr("class", ({ count }) => (count ? null : "aside")).text(({ count }) => count);

        board.replaceChildren(svg.node());
        legend.replaceChildren(
            ...d3.range(Math.min(most ?? 0, COLORS)).map((n) =>
                worklog.element("span", { style: `--color: var(--bank${n})` }, ordinal(n, most)),
            ),
        );
    }

    function ordinal(n, most) {
        const all = d3.range(n + 1, most + 1, COLORS);
        return n ? all.join(", ") : `wavefront ${all.join(", ")}`;
    }

    function span(lanes) {
        const whole = lanes.length > 1 && lanes.at(-1) - lanes[0] === lanes.length - 1;
        return lanes.length === 1 ? `lane ${lanes[0]}` : `lanes ${whole ? `${lanes[0]}–${lanes.at(-1)}` : lanes.join(", ")}`;
    }

    function short(lanes) {
        if (lanes.length === 1) return lanes[0];
        return lanes.at(-1) - lanes[0] === lanes.length - 1 ? `${lanes[0]}–${lanes.at(-1)}` : `${lanes.length}×`;
    }
};
