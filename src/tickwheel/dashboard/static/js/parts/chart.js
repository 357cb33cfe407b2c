// Lines over time, in the colours of the theme.
import { html, useEffect, useRef } from "../lib.js";

const HEIGHT = 190;

function colour(name) {
  // Resolved by the browser: a canvas knows neither variables nor light-dark().
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const faded = (text) => text.replace(/^rgb\((.*)\)$/, "rgb($1 / 14%)").replaceAll(",", " ");

/**
 * `times`: seconds since the epoch. `series`: `{ label, values, colour, fill, dash }`.
 * `format`: how a value is written. `log`: a logarithmic scale.
 */
export function Chart({ label, times, series, format, log = false, least = 1 }) {
  const element = useRef(null);
  const plot = useRef(null);
  const formats = useRef(format);
  formats.current = format;
  const shape = JSON.stringify([series.map((each) => [each.label, each.colour, each.fill, each.dash]), log]);

  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const width = element.current.clientWidth || 600;
      plot.current = new window.uPlot(options(width, series, formats, log, least), data(times, series), element.current);
    };
    draw();
    const sizes = new ResizeObserver(() => {
      const width = element.current?.clientWidth;
      if (width && width !== plot.current.width) plot.current.setSize({ width, height: HEIGHT });
    });
    sizes.observe(element.current);
    const themes = new MutationObserver(draw);
    themes.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", draw);
    return () => {
      sizes.disconnect();
      themes.disconnect();
      system.removeEventListener("change", draw);
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(data(times, series)), [times, series]);

  return html`<figure>
    <div class="chart" ref=${element} role="img" aria-label=${`${label}: ${summary(series, format)}`}></div>
    <figcaption class="legend">${series.map(
      (each) => html`<span><i style=${{ background: `var(--${each.colour})` }}></i>${each.label} <b class="num">${format(last(each.values))}</b></span>`,
    )}</figcaption>
  </figure>`;
}

/** Of the last slot: what was before may be long ago. */
const last = (values) => values.at(-1) ?? null;

const summary = (series, format) => series.map((each) => `${each.label} ${format(last(each.values))}`).join(", ");

const data = (times, series) => [times, ...series.map((each) => each.values)];

/** Local times; days, where the marks are days apart. */
function clockTimes(plot, marks) {
  const days = marks.length > 1 && marks[1] - marks[0] >= 86_400;
  const [date, clock] = [{ month: "short", day: "numeric" }, { hour: "2-digit", minute: "2-digit", hour12: false }];
  return marks.map((at) => new Date(at * 1000).toLocaleString("en", days ? date : clock));
}

/** On a logarithmic scale, lines between the decades would merge. */
const decades = (_, marks) => marks.map((mark) => (Math.abs(Math.log10(mark) - Math.round(Math.log10(mark))) < 1e-9 ? mark : null));

const decadesOnly = ({ grid, ticks }) => ({ filter: decades, grid: { ...grid, filter: decades }, ticks: { ...ticks, filter: decades } });

function options(width, series, formats, log, least) {
  const muted = colour("muted");
  const grid = { stroke: colour("line"), width: 1 };
  const axis = { stroke: muted, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
  const written = (_, values) => values.map((value) => (value === null ? "" : formats.current(value)));
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { size: 5 } },
    scales: { y: log ? { distr: 3, range: (_, low, high) => [least, Math.max(high ?? 0, least * 100)] } : { range: (_, low, high) => [0, Math.max(high ?? 0, least)] } },
    axes: [{ ...axis, values: clockTimes }, { ...axis, size: 62, values: written, ...(log ? decadesOnly(axis) : {}) }],
    series: [
      {},
      ...series.map((each) => {
        const stroke = colour(each.colour);
        return {
          label: each.label,
          stroke,
          width: 1.6,
          fill: each.fill ? faded(stroke) : undefined,
          dash: each.dash ? [5, 4] : undefined,
          points: { show: false },
          spanGaps: false,
        };
      }),
    ],
  };
}
