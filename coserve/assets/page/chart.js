// Charts as inline SVG: lines over steps or time, and stacked areas. Drawn at the size they have.

import { el, number, setText, svg } from "./dom.js";

const LEFT = 56;
const BOTTOM = 22;
const TOP = 8;
const RIGHT = 10;

/** Round values between 0 and `top`, about `count`. */
function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/** At most `most` points, the last one among them. */
function thinned(points, most) {
  const stride = Math.ceil(points.length / most);
  return stride <= 1 ? points : points.filter((_, at) => (points.length - 1 - at) % stride === 0);
}

export class Chart {
  /** `stacked`: values add up, in steps that end at their x. `held`: a value lasts until the next one. `x`, `y`: format a value. `zero`: the axis begins at 0. */
  constructor(title, { x = number, y = number, stacked = false, held = false, zero = true, height = 180, top = null } = {}) {
    Object.assign(this, { title, x, y, stacked, held, zero, height, top, series: [], at: null });
    this.legend = el("ul", { class: "legend" });
    this.readout = el("output", { class: "readout" });
    this.drawing = svg("svg", { role: "img", tabindex: 0, height });
    this.node = el("figure", {}, el("figcaption", {}, el("strong", {}, title), this.legend), this.drawing, this.readout);
    this.drawing.addEventListener("pointermove", (event) => {
      this.point(this.toX(event.clientX - this.drawing.getBoundingClientRect().left));
    });
    for (const name of ["pointerleave", "blur"]) this.drawing.addEventListener(name, () => this.point(null));
    this.drawing.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by === undefined) return;
      const xs = [...new Set(this.series.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
      const now = xs.indexOf(this.at);
      this.point(xs[Math.max(0, Math.min(xs.length - 1, now < 0 ? xs.length - 1 : now + by))] ?? null);
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  name(title) {
    this.title = title;
    setText(this.node.querySelector("strong"), title);
  }

  /** `series`: `{name, points: [[x, y], ...], dashed, color}`, x ascending; an area may say where it begins: `[x, y, from]`. `range`: the first and last x. */
  update(series, range = null) {
    this.series = series.filter((one) => one.points.length);
    this.range = range;
    this.draw();
  }

  scales() {
    const width = Math.max(200, this.node.clientWidth);
    const xs = this.series.flatMap((one) => [one.points[0][0], one.points.at(-1)[0]]);
    let [first, last] = this.range ?? [Math.min(...xs), Math.max(...xs)];
    if (first === last) last = first + 1;
    const values = this.stacked
      ? [...this.sums().values()] : this.series.flatMap((one) => one.points.map((point) => point[1]));
    let low = this.zero ? 0 : values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = this.top ?? values.reduce((a, b) => Math.max(a, b), this.zero ? 0 : -Infinity);
    if (low === high) (high += Math.abs(high) || 1), (low -= this.zero ? 0 : Math.abs(low) / 2);
    else if (this.top === null) (high += (high - low) * 0.05), (low -= this.zero ? 0 : (high - low) * 0.05);
    const inner = [width - LEFT - RIGHT, this.height - TOP - BOTTOM];
    return {
      width, first, last, low, high,
      px: (x) => LEFT + (inner[0] * (x - first)) / (last - first),
      py: (y) => TOP + inner[1] * (1 - (y - low) / (high - low)),
    };
  }

  sums() {
    const found = new Map();
    for (const one of this.series) for (const [x, y] of one.points) found.set(x, (found.get(x) ?? 0) + y);
    return found;
  }

  draw() {
    if (!this.node.isConnected || !this.node.clientWidth) return;
    const names = this.series.map((one) => one.name);
    if (this.names !== names.join("\n")) {
      this.names = names.join("\n");
      this.legend.replaceChildren(...this.series.map((one, at) => el("li", {}, el("i", { class: `s${one.color ?? at}` }), one.name)));
    }
    if (!this.series.length) {
      this.drawing.setAttribute("aria-label", `${this.title}: no data yet`);
      this.drawing.replaceChildren(svg("text", { x: LEFT, y: this.height / 2 }, "no data yet"));
      return;
    }
    const to = (this.scale = this.scales());
    const bottom = this.height - BOTTOM;
    const parts = [];
    for (const y of ticks(to.low, to.high, 4)) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: to.width - RIGHT, y1: to.py(y), y2: to.py(y) }));
      parts.push(svg("text", { x: LEFT - 6, y: to.py(y) + 4, "text-anchor": "end" }, this.y(y)));
    }
    for (const x of ticks(to.first, to.last, to.width / 110)) {
      const anchor = to.px(x) > to.width - 30 ? "end" : "middle";
      if (x >= to.first) parts.push(svg("text", { x: to.px(x), y: bottom + 16, "text-anchor": anchor }, this.x(x)));
    }
    parts.push(...(this.stacked ? this.areas(to) : this.lines(to)));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: bottom, visibility: "hidden" });
    this.drawing.setAttribute("viewBox", `0 0 ${to.width} ${this.height}`);
    this.drawing.setAttribute("aria-label", this.summary());
    this.drawing.replaceChildren(...parts, this.cursor);
    if (this.at !== null) this.point(this.at);
  }

  lines(to) {
    return this.series.flatMap((one, at) => {
      const points = thinned(one.points, to.width);
      const path = points.reduce((text, point) => {
        const [x, y] = [to.px(point[0]).toFixed(1), to.py(point[1]).toFixed(1)];
        return text + (!text ? `M${x} ${y}` : this.held ? `H${x}V${y}` : `L${x} ${y}`);
      }, "");
      const name = `line s${one.color ?? at}${one.dashed ? " dashed" : ""}`;
      const dots = points.length <= 40 && !this.held ? points.map(([x, y]) => svg("circle", { class: name, cx: to.px(x), cy: to.py(y), r: 2 })) : [];
      return [svg("path", { class: name, d: path }), ...dots];
    });
  }

  areas(to) {
    const base = new Map();
    return this.series.map((one, at) => {
      let [above, below, before] = ["", "", null];
      for (const [x, y, from] of one.points) {
        const [x0, x1] = [to.px(from ?? before ?? x).toFixed(1), to.px(x).toFixed(1)];
        const low = base.get(x) ?? 0;
        above += `${above ? "L" : "M"}${x0} ${to.py(low + y).toFixed(1)}L${x1} ${to.py(low + y).toFixed(1)}`;
        below = `L${x1} ${to.py(low).toFixed(1)}L${x0} ${to.py(low).toFixed(1)}${below}`;
        base.set(x, low + y);
        before = x;
      }
      return svg("path", { class: `area s${one.color ?? at}`, d: `${above}${below}Z` });
    });
  }

  summary() {
    const each = this.series.map((one) => {
      const values = one.points.map((point) => point[1]);
      const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
      return `${one.name}: last ${this.y(values.at(-1))}, between ${this.y(low)} and ${this.y(high)}`;
    });
    return `${this.title}. ${each.join("; ")}. Arrow keys read values.`;
  }

  toX(px) {
    const { first, last, width } = this.scale ?? { first: 0, last: 1, width: 1 };
    return first + ((last - first) * (px - LEFT)) / (width - LEFT - RIGHT);
  }

  /** Read the values nearest to `x`, or none. */
  point(x) {
    this.at = x;
    if (x === null || !this.series.length) {
      this.cursor?.setAttribute("visibility", "hidden");
      return setText(this.readout, "");
    }
    const nearest = this.series.map((one) => one.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)));
    const px = this.scale.px(nearest[0][0]);
    for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, px);
    this.cursor.setAttribute("visibility", "visible");
    const values = this.series.map((one, at) => `${one.name} ${this.y(nearest[at][1])}`);
    return setText(this.readout, `${this.x(nearest[0][0])}: ${values.join(", ")}`);
  }
}
