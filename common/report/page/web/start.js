{
    const data = JSON.parse(document.getElementById("data").textContent);
    for (const root of document.querySelectorAll("section[data-kind]")) {
        try {
            worklog.sections[root.dataset.kind](root, data[root.id]);
        } catch (error) {
            reportError(error); // the other sections do without this one
        }
    }
}
