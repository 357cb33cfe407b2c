// The head of a screen: its name, and what can be done.
import { html } from "../lib.js";

export function Heading({ title, children }) {
  return html`<div class="heading"><h1 tabindex="-1">${title}</h1>${children}</div>`;
}

/** A part of a screen with a name. */
export function Panel({ title, tools, children, class: more = "", inner = true }) {
  return html`<section class=${`panel ${more}`} aria-label=${typeof title === "string" ? title : undefined}>
    ${title && html`<header><h2>${title}</h2><span class="spring"></span>${tools}</header>`}
    ${inner ? html`<div class="inner">${children}</div>` : children}
  </section>`;
}
