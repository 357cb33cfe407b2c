// Keys: what each does now, and whether somebody is typing.

const handlers = [];

/** Handle keys while a part of the page is shown: `{ j: () => …, "g j": () => … }`. */
export function onKeys(keys) {
  handlers.push(keys);
  return () => handlers.splice(handlers.indexOf(keys), 1);
}

let prefix = "";
let forget = 0;

function typing(target) {
  return target.closest("input, textarea, select, [contenteditable]") !== null;
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (typing(event.target) || document.querySelector("dialog[open]")) return;
  const key = prefix ? `${prefix} ${event.key}` : event.key;
  prefix = "";
  clearTimeout(forget);
  // The part that came last is the innermost.
  const handler = handlers.findLast((keys) => key in keys);
  if (handler) {
    event.preventDefault();
    handler[key]();
  } else if (event.key === "g") {
    prefix = "g";
    forget = setTimeout(() => (prefix = ""), 1000);
  }
});
