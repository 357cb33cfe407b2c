// What every module draws with.
import { Fragment, createContext, h, render } from "../vendor/preact.mjs";
import {
  useCallback,
  useContext,
  useEffect,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "../vendor/hooks.mjs";
import htm from "../vendor/htm.mjs";

export const html = htm.bind(h);
export {
  Fragment,
  createContext,
  h,
  render,
  useCallback,
  useContext,
  useEffect,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
};

/** A value that outlives the page, if the browser lets us keep it. */
export function stored(name, otherwise) {
  try {
    return localStorage.getItem(`tickwheel.${name}`) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(`tickwheel.${name}`);
    else localStorage.setItem(`tickwheel.${name}`, value);
  } catch {
    // Blocked: the choice holds until the page is left.
  }
}

/** Draws again whenever `source.subscribe` calls back. */
export function useSource(source) {
  const [, draw] = useReducer((n) => n + 1, 0);
  useEffect(() => source.subscribe(draw), [source]);
}

/** Something that others can listen to. */
export class Source {
  #listeners = new Set();

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  tell() {
    for (const listener of [...this.#listeners]) listener();
  }
}
