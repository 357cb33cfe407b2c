// A button that opens a list of things to do.
import { html, useEffect, useRef } from "../lib.js";

export function Menu({ label, title, children, class: more = "" }) {
  const element = useRef(null);
  useEffect(() => {
    const close = (event) => {
      // Taken away by the same click that is still on its way.
      if (!element.current) return;
      const outside = event.type === "click" && !element.current.contains(event.target);
      if (outside || event.key === "Escape") element.current.open = false;
    };
    addEventListener("click", close);
    addEventListener("keydown", close);
    return () => {
      removeEventListener("click", close);
      removeEventListener("keydown", close);
    };
  }, []);
  const picked = (event) => {
    if (event.target.closest("button, a")) element.current.open = false;
  };
  return html`<details class="menu" ref=${element}>
    <summary class=${`button ${more}`} role="button" aria-label=${title} title=${title}>${label}</summary>
    <div class="items" onClick=${picked}>${children}</div>
  </details>`;
}
