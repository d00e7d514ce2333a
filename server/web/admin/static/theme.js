// The theme of the pages, stored in this browser: "auto" follows the system. Runs before the page is rendered.
(() => {
  "use strict";
  const PLACE = "strata-theme";
  const THEMES = ["auto", "light", "dark"];

  const read = () => {
    try {
      const kept = localStorage.getItem(PLACE);
      return THEMES.includes(kept) ? kept : "auto";
    } catch {
      return "auto"; // storage is disabled
    }
  };

  const keep = (theme) => {
    try {
      localStorage.setItem(PLACE, theme);
    } catch {
      // it applies to this page only
    }
  };

  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };

  let theme = read();
  show(theme);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      button.textContent = `Theme: ${theme}`;
    };
    name();
    button.hidden = false;
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      keep(theme);
      show(theme);
      name();
    });
  });
})();
