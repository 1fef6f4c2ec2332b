// Draws every chart of the page anew so that it answers to the pointer. Without this script, or where it may
// not run, the charts of the page stay as they are.
"use strict";
(() => {
  const drawing = {
    mode: "vega-lite",
    renderer: "svg", // colours are CSS variables of the page
    actions: false,
    defaultStyle: false,
    ast: true, // nothing is evaluated, whatever a page's policy forbids
    tooltip: { disableDefaultStyle: true },
  };

  async function enliven(figure) {
    const live = figure.querySelector(".live");
    const spec = JSON.parse(figure.querySelector("script").textContent);
    figure.classList.add("is-live");
    try {
      await vegaEmbed(live, spec, drawing);
    } catch (error) {
      figure.classList.remove("is-live");
      console.warn(error);
    }
  }

  function help(first) {
    const text = document.createElement("p");
    text.className = "note help";
    text.textContent =
      "Point at a curve to read it. Drag to move along it, pinch or hold Ctrl and turn the wheel to zoom, " +
      "double-click to see all again. Click names in a legend to show those alone.";
    first.before(text);
  }

  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          seen.unobserve(entry.target);
          enliven(entry.target);
        }
      }
    },
    { rootMargin: "400px" },
  );
  document.querySelectorAll("figure").forEach((figure) => seen.observe(figure));
  const first = document.querySelector(".charts");
  if (first) help(first);
})();
