// The link of a problem selects its line in the field. Without this script it goes to the field.
(() => {
  "use strict";
  document.addEventListener("click", (event) => {
    const link = event.target.closest(".problems a[data-line]");
    const field = link && document.getElementById(link.hash.slice(1));
    if (!(field instanceof HTMLTextAreaElement)) return;
    event.preventDefault();
    field.focus();
    const line = Number(link.dataset.line);
    if (!line) return;
    const lines = field.value.split("\n");
    const start = lines.slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0);
    field.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    const height = Number.parseFloat(getComputedStyle(field).lineHeight);
    field.scrollTop = Math.max(0, (line - 3) * height);
    field.scrollIntoView({ block: "center" });
  });
})();
