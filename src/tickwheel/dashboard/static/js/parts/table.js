// Tables: rows that stay where they are while somebody points at them.
import { Fragment, html, useLayoutEffect, useRef, useState } from "../lib.js";
import { onKeys } from "../keyboard.js";
import { plural } from "../format.js";

/**
 * Rows in a steady order. While `held`, rows that are shown keep their places and are only updated;
 * those that are gone stay, marked, and new ones wait. Returns the rows and how many wait.
 */
export function steady(shown, rows, keyOf, held) {
  if (!held) return { rows: rows.map((row) => ({ row, gone: false })), waiting: 0 };
  const latest = new Map(rows.map((row) => [keyOf(row), row]));
  const kept = shown.map(({ row }) => {
    const now = latest.get(keyOf(row));
    latest.delete(keyOf(row));
    return { row: now ?? row, gone: now === undefined };
  });
  return { rows: kept, waiting: latest.size };
}

/**
 * A table. `columns`: `{ label, cell(row), class }`. `selected`: a Set of keys with `onSelect`.
 * `open(row)`: what Enter does with the current row. j and k move, x selects.
 */
export function Table({ caption, columns, rows, keyOf, selected, onSelect, open, empty }) {
  const [held, setHeld] = useState(false);
  const [current, setCurrent] = useState(null);
  const shown = useRef([]);
  const anchor = useRef(null);
  const state = steady(shown.current, rows, keyOf, held || (selected?.size ?? 0) > 0);
  shown.current = state.rows;
  const keys = state.rows.map(({ row }) => keyOf(row));

  const move = (by) => {
    if (keys.length === 0) return;
    const at = keys.indexOf(current);
    const next = keys[Math.min(Math.max(at < 0 ? 0 : at + by, 0), keys.length - 1)];
    setCurrent(next);
    document.getElementById(rowId(next))?.scrollIntoView({ block: "nearest" });
  };
  const toggle = (key, range = false) => {
    const next = new Set(selected);
    const from = keys.indexOf(anchor.current);
    const to = keys.indexOf(key);
    const several = range && from >= 0 ? keys.slice(Math.min(from, to), Math.max(from, to) + 1) : [key];
    const add = !selected.has(key);
    for (const each of several) add ? next.add(each) : next.delete(each);
    anchor.current = key;
    onSelect(next);
  };
  // Before the next key can come: two keys in a row act on the row that the first one chose.
  useLayoutEffect(() => {
    const actions = { j: () => move(1), k: () => move(-1) };
    const row = state.rows[keys.indexOf(current)]?.row;
    if (row && open) actions.Enter = () => open(row);
    if (row && onSelect) actions.x = () => toggle(current);
    return onKeys(actions);
  });

  if (state.rows.length === 0 && state.waiting === 0) return empty ?? null;
  const all = selected && keys.length > 0 && keys.every((key) => selected.has(key));
  return html`<${Fragment}>
    ${state.waiting > 0 &&
    html`<button class="button small more-rows" onClick=${() => { setHeld(false); onSelect?.(new Set()); }}>
      ${plural(state.waiting, "new row")}: show
    </button>`}
    <div class="scroll" tabindex="0" role="group" aria-label=${caption} onPointerEnter=${() => setHeld(true)} onPointerLeave=${() => setHeld(false)}>
      <table class="table stacks">
        <caption class="visually-hidden">${caption}</caption>
        <thead><tr>
          ${onSelect && html`<th class="tight" scope="col"><input type="checkbox" aria-label="Select all rows" checked=${all}
            onChange=${() => onSelect(all ? new Set() : new Set(keys))} /></th>`}
          ${columns.map((column) => html`<th scope="col" class=${column.class}>${column.label}</th>`)}
        </tr></thead>
        <tbody>
          ${state.rows.map(({ row, gone }) => {
            const key = keyOf(row);
            return html`<tr key=${key} id=${rowId(key)} class=${`${key === current ? "current" : ""} ${gone ? "gone" : ""}`}>
              ${onSelect && html`<td class="tight"><input type="checkbox" aria-label=${`Select ${key}`} checked=${selected.has(key)}
                onClick=${(event) => toggle(key, event.shiftKey)} /></td>`}
              ${columns.map((column) => html`<td class=${column.class} data-label=${column.label || undefined}>${column.cell(row)}</td>`)}
            </tr>`;
          })}
        </tbody>
      </table>
    </div>
  <//>`;
}

const rowId = (key) => `row-${encodeURIComponent(key)}`;
