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

  let vega; // a promise, once the first chart is seen
  async function unpacked(element) {
    const packed = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  async function loaded() {
    const script = document.createElement("script");
    script.textContent = await unpacked(document.getElementById("vega"));
    document.head.append(script);
  }

  async function enliven(figure) {
    const live = figure.querySelector(".live");
    try {
      await (vega ??= loaded());
      const spec = JSON.parse(await unpacked(figure.querySelector("script")));
      figure.classList.add("is-live");
      await vegaEmbed(live, spec, drawing);
    } catch (error) {
      figure.classList.remove("is-live");
      console.warn(error);
    }
  }

  function help(last) {
    const text = document.createElement("p");
    text.className = "note help";
    text.textContent =
      "Point at a curve to read it. Drag to move along it, pinch or hold Ctrl and turn the wheel to zoom, " +
      "double-click to see all again. Click names in a legend to show those alone.";
    last.after(text);
  }

  // On a phone what comes after the answer begins folded; all of it is printed.
  const later = document.querySelectorAll("details.later");
  const fold = (isOpen) => later.forEach((part) => (part.open = isOpen));
  if (matchMedia("(max-width: 600px)").matches) fold(false);
  addEventListener("beforeprint", () => fold(true));

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
  const charts = document.querySelector(".charts");
  if (charts) help(charts);
})();
