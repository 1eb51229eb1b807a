"use strict";
const root = document.documentElement, by = (id) => document.getElementById(id);
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
const number = (value, missing = "–") => (value === null || value === undefined ? missing : String(Number(value.toPrecision(3))));

// the theme of the browser until a reader chooses; a page that draws by script draws again
const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = (value) => {
  try {
    if (value !== undefined) localStorage.setItem("rlstab-theme", value);
    return localStorage.getItem("rlstab-theme");
  } catch {
    return null; // a browser may forbid storage to files
  }
};
function paint(theme) {
  const next = theme === "dark" ? "Light" : "Dark";
  root.dataset.theme = theme;
  by("theme").textContent = next;
  by("theme").setAttribute("aria-label", `Switch to the ${next.toLowerCase()} theme`);
  root.dispatchEvent(new Event("painted"));
}
const repaint = () => paint(stored() ?? (dark.matches ? "dark" : "light"));
by("theme").addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  stored(theme);
  paint(theme);
});
dark.addEventListener("change", repaint);
repaint();

// the pointer, or the arrow keys, read one of `count` values after another; null is none of them
function reader(element, count, atPointer, show) {
  let current = null;
  const read = (index) => {
    current = index;
    show(index);
  };
  element.addEventListener("pointermove", (event) => read(atPointer(event)));
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, () => read(null));
  element.addEventListener("keydown", (event) => {
    const last = count - 1;
    const next = { ArrowLeft: Math.max((current ?? count) - 1, 0), ArrowRight: Math.min((current ?? -1) + 1, last), Home: 0, End: last, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    read(next);
  });
}
for (const chart of all(".chart")) {
  const hits = all(".hit", chart), text = chart.parentElement.querySelector(".read");
  const atPointer = (event) => (event.target.closest(".hit") ? hits.indexOf(event.target.closest(".hit")) : null);
  reader(chart, hits.length, atPointer, (index) => {
    hits.forEach((hit, other) => hit.classList.toggle("on", other === index));
    text.textContent = index === null ? "" : hits[index].dataset.text;
  });
}
