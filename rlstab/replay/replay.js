"use strict";
(() => {
  const root = document.documentElement, button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${button.textContent.toLowerCase()} theme`);
  };
  show(dark.matches ? "dark" : "light");
  button.addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));
  addEventListener("beforeprint", () => { root.dataset.theme = "light"; });
  addEventListener("afterprint", () => show(dark.matches ? "dark" : "light"));
})();
