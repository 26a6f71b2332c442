const worklog = {
    sections: {}, // by kind: brings a section to life, given its element and its data
    models: {}, // the playgrounds' mathematics, which know nothing of the page

    // An element with these properties ("aria-label" and the like are attributes) and children.
    element(name, properties = {}, ...children) {
        const made = document.createElement(name);
        for (const [key, value] of Object.entries(properties)) {
            if (key in made) made[key] = value;
            else made.setAttribute(key, value);
        }
        made.append(...children);
        return made;
    },

    // A plot's mark that says what is near the pointer. It comes and goes, so that plot() below cannot
    // take its name away: it is hidden from assistive technology itself.
    tip(data, options) {
        const look = { fill: "var(--page)", ariaHidden: "true" };
        return Plot.tip(data, Plot.pointer({ ...look, ...options }));
    },

    // Keeps a plot in a container as wide as that, from when it comes near the screen on; until then
    // its place is kept. options(width) are Plot's with a height, a label that says in words what the
    // plot shows and, where one can pick a mark with a tip, onChoose(its datum). Returns a function
    // that draws again.
    plot(container, options) {
        let near = false;
        const draw = () => {
            const width = Math.floor(container.clientWidth);
            if (!near || !width) return;
            const { label, onChoose, ...rest } = options(width);
            const figure = Plot.plot({ width, ...rest });
            if (onChoose) {
                figure.addEventListener("click", () => figure.value && onChoose(figure.value));
            }
            // An image to assistive technology: its parts have no names of their own.
            for (const part of figure.querySelectorAll("[aria-label]")) {
                part.removeAttribute("aria-label");
            }
            figure.setAttribute("role", "img");
            figure.setAttribute("aria-label", label);
            container.replaceChildren(figure);
        };
        const keepPlace = () => {
            const { height } = options(container.clientWidth);
            container.replaceChildren(worklog.element("div", { style: `height: ${height}px` }));
        };
        queueMicrotask(keepPlace); // when the section that asks has all that options() reads
        new IntersectionObserver(
            (entries, observer) => {
                if (!entries.some((entry) => entry.isIntersecting)) return;
                observer.disconnect();
                near = true;
                new ResizeObserver(draw).observe(container);
            },
            { rootMargin: "400px" },
        ).observe(container);
        return draw;
    },
};
