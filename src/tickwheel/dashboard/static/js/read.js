// Documents that are read when they are needed, rather than watched.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./lib.js";

// How many such reads are under way at a time: a long page must not keep others waiting.
const AT_A_TIME = 4;

const queue = [];
let underWay = 0;

/** Read a document, a few at a time. `wanted()`: whether anybody still waits for it. */
export function readInTurn(path, wanted = () => true) {
  return new Promise((resolve, reject) => {
    queue.push({ path, wanted, resolve, reject });
    next();
  });
}

function next() {
  while (underWay < AT_A_TIME && queue.length) {
    const { path, wanted, resolve, reject } = queue.shift();
    if (!wanted()) continue;
    underWay += 1;
    get(path).then(resolve, reject).finally(() => {
      underWay -= 1;
      next();
    });
  }
}

/**
 * The document at this path: read once, again when `version` changes, and each `every` milliseconds
 * while the tab is seen. No path: nothing is read. Keeps what it has while it reads again.
 */
export function useRead(path, { version = "", every = 0 } = {}) {
  const [state, setState] = useState({ path: null, document: undefined, problem: null });
  const [again, setAgain] = useState(0);
  const latest = useRef(0);
  useEffect(() => {
    if (!path) return undefined;
    const mine = ++latest.current;
    const current = () => mine === latest.current;
    const read = () =>
      readInTurn(path, current).then(
        (document) => current() && setState({ path, document, problem: null }),
        (problem) => current() && setState((before) => ({ path, document: before.path === path ? before.document : undefined, problem })),
      );
    read();
    const timer = every ? setInterval(() => document.hidden || read(), every) : 0;
    return () => {
      latest.current += 1;
      clearInterval(timer);
    };
  }, [path, version, every, again]);
  const known = path && state.path === path ? state : { document: undefined, problem: null };
  return { document: known.document, problem: known.problem, reload: () => setAgain((n) => n + 1) };
}

/** A value that has not changed for a while. */
export function useSettled(value, ms = 300) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return settled;
}
