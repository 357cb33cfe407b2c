// Runs before the first paint: the chosen theme, or the system's.
(function () {
  var theme = null;
  try {
    theme = localStorage.getItem("tickwheel.theme");
  } catch {
    // Storage may be blocked: then the system's theme it is.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
