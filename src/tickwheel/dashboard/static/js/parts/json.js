// JSON as a tree that folds, with numbers exactly as they were sent.
import { Exact } from "../api.js";
import { html } from "../lib.js";
import { CopyButton } from "./marks.js";

// Deeper or longer parts are folded at first.
const OPEN_DEPTH = 3;
const OPEN_SIZE = 50;
const SHOWN_SIZE = 500;

export function Json({ value, label }) {
  return html`<div class="code">
    <div class="json" tabindex="0" role="group" aria-label=${label}><${Node} value=${value} depth=${0} /></div>
    <${CopyButton} text=${() => text(value)} class="small copy" />
  </div>`;
}

/** As JSON text, exact numbers included. */
export function text(value, space = 2) {
  return JSON.stringify(value, null, space);
}

function Node({ value, depth }) {
  if (value === null || typeof value === "boolean") return html`<span class="word">${String(value)}</span>`;
  if (value instanceof Exact || typeof value === "number") return html`<span class="number">${String(value)}</span>`;
  if (typeof value === "string") return html`<bdi class="string">${JSON.stringify(value)}</bdi>`;
  return html`<${Branch} value=${value} depth=${depth} />`;
}

function Branch({ value, depth }) {
  const list = Array.isArray(value);
  const entries = Object.entries(value);
  const [open, close] = list ? ["[", "]"] : ["{", "}"];
  if (entries.length === 0) return html`<span>${open}${close}</span>`;
  const size = `${entries.length} ${list ? "items" : "fields"}`;
  return html`<details open=${depth < OPEN_DEPTH && entries.length <= OPEN_SIZE}>
    <summary aria-label=${size}>${open}</summary>
    ${entries.slice(0, SHOWN_SIZE).map(
      ([name, inner], n) => html`<span class="indent">
        ${list ? null : html`<bdi class="name">${JSON.stringify(name)}</bdi>: `}<${Node} value=${inner} depth=${depth + 1} />${n < entries.length - 1 ? "," : ""}
      </span>`,
    )}
    ${entries.length > SHOWN_SIZE && html`<span class="indent quiet">… ${entries.length - SHOWN_SIZE} more: copy to see all</span>`}
    <span>${close}</span>
  </details>`;
}
