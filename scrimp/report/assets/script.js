"use strict";
// Draws each chart at the width of its place, and moves a cursor by pointer and by keyboard. All figures are in the page.
const NS = "http://www.w3.org/2000/svg", LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 34;

function bytes(n) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(n) < 1024) return unit === "B" ? `${n.toFixed(0)} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1024;
  }
  return `${n.toFixed(1)} TiB`;
}

function plain(n) {
  return n !== 0 && (Math.abs(n) < 0.001 || Math.abs(n) >= 1e7) ? n.toExponential(2) : String(+n.toPrecision(5));
}

function seconds(n) {
  const [unit, size] = Math.abs(n) >= 1 || n === 0 ? ["s", 1] : Math.abs(n) >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  return `${+(n / size).toPrecision(4)} ${unit}`;
}

const FORMAT = { bytes, seconds, plain };

function ticks(low, high, count, binary) {
  const span = high - low || 1;
  if (binary) {
    let step = 1;
    while (span / step > count) step *= 2;
    return range(low, high, step);
  }
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = power * [1, 2, 5, 10].find((factor) => span / (power * factor) <= count);
  return range(low, high, step);
}

function range(low, high, step) {
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

function add(parent, tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

// The last point at or before a place.
function before(xs, place) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= place) low = middle; else high = middle - 1;
  }
  return low;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.plot = figure.querySelector(".plot");
    this.legend = figure.querySelector(".legend");
    this.readout = figure.querySelector(".readout");
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.off = new Set();
    this.format = FORMAT[this.data.unit];
    this.formatX = FORMAT[this.data.x_unit || "plain"];
    this.main = this.data.series.find((each) => each.x.length) || this.data.series[0];
    this.at = null;
    this.buttons();
    this.draw();
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("focus", () => { if (this.at === null) this.move(this.data.start || 0); });
    new ResizeObserver(() => { if (this.plot.clientWidth !== this.width) this.draw(); }).observe(this.plot);
    this.move(this.data.start || 0);
  }

  shown() { return this.data.series.filter((each) => !this.off.has(each.name)); }

  buttons() {
    if (this.data.series.length < 2) return;
    for (const each of this.data.series) {
      const button = document.createElement("button");
      button.type = "button";
      const mark = document.createElement("span");
      mark.className = each.dash ? "dash" : "swatch";
      if (each.dash) mark.style.borderColor = each.colour; else mark.style.background = each.colour;
      button.append(mark, each.name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        if (this.off.has(each.name)) this.off.delete(each.name); else this.off.add(each.name);
        button.setAttribute("aria-pressed", String(!this.off.has(each.name)));
        this.draw();
        if (this.at !== null) this.move(this.at);
      });
      this.legend.appendChild(button);
    }
  }

  // The values of a line; those of a stack's outline follow from the kinds that are shown.
  values(each) {
    if (!each.kinds) return each.y;
    const names = Object.keys(each.kinds).filter((name) => !this.off.has(name));
    return each.x.map((_, k) => names.reduce((sum, name) => sum + each.kinds[name][k], 0));
  }

  draw() {
    this.width = this.plot.clientWidth;
    const width = this.width, height = width < 500 ? 220 : 290, right = width - RIGHT, bottom = height - BOTTOM;
    const shown = this.shown(), stack = shown.filter((each) => each.stack), lines = shown.filter((each) => !each.stack);
    const all = this.data.series.flatMap((each) => (each.x.length ? [each.x[0], each.x[each.x.length - 1]] : []));
    const low = Math.min(...all), high = Math.max(...all, low + (this.data.steps ? 1 : 1e-9)), end = this.data.end || high;
    const tops = stack.length ? stack[0].x.map((_, k) => stack.reduce((sum, each) => sum + each.y[k], 0)) : [];
    let most = 0, least = this.data.zero === false ? Infinity : 0;
    for (const value of tops) most = Math.max(most, value);
    for (const each of lines) {
      for (const value of this.values(each)) if (value !== null) { most = Math.max(most, value); least = Math.min(least, value); }
    }
    if (!isFinite(least)) least = 0;
    if (most <= least) most = least + 1;
    most += (most - least) * 0.06;
    const X = (this.X = (x) => LEFT + ((x - low) / (end - low || 1)) * (right - LEFT));
    const Y = (y) => bottom - ((y - least) / (most - least)) * (bottom - TOP);
    this.inverse = (px) => low + ((px - LEFT) / (right - LEFT)) * (end - low || 1);
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-hidden", "true");
    for (const tick of ticks(least, most, 5, this.data.unit === "bytes")) {
      add(svg, "line", { class: "grid", x1: LEFT, x2: right, y1: Y(tick), y2: Y(tick) });
      add(svg, "text", { x: LEFT - 8, y: Y(tick) + 4, "text-anchor": "end" }, this.format(tick));
    }
    for (const tick of ticks(low, end, width < 500 ? 4 : 8, this.data.x_unit === "bytes")) {
      add(svg, "line", { class: "axis", x1: X(tick), x2: X(tick), y1: bottom, y2: bottom + 4 });
      add(svg, "text", { x: X(tick), y: bottom + 16, "text-anchor": "middle" }, this.formatX(tick));
    }
    add(svg, "text", { x: (LEFT + right) / 2, y: height - 4, "text-anchor": "middle" }, this.data.x_label);
    const base = stack.length ? new Float64Array(stack[0].x.length) : null;
    for (const each of stack) {
      const up = [], down = [];
      each.x.forEach((x, k) => {
        const next = k + 1 < each.x.length ? each.x[k + 1] : end;
        const from = base[k], to = from + each.y[k];
        up.push(`${X(x).toFixed(1)},${Y(to).toFixed(1)} ${X(next).toFixed(1)},${Y(to).toFixed(1)}`);
        down.push(`${X(next).toFixed(1)},${Y(from).toFixed(1)} ${X(x).toFixed(1)},${Y(from).toFixed(1)}`);
        base[k] = to;
      });
      add(svg, "polygon", { points: [...up, ...down.reverse()].join(" "), style: `fill:${each.colour}` });
    }
    for (const each of lines) this.line(svg, each, X, Y, end);
    this.cursor = add(svg, "line", { class: "cursor", y1: TOP, y2: bottom, x1: -9, x2: -9 });
    this.plot.replaceChildren(svg);
    if (this.at !== null) this.mark();
  }

  line(svg, each, X, Y, end) {
    const values = this.values(each), style = `fill:none;stroke:${each.colour};stroke-width:${each.dash ? 2 : 1.6}`;
    const group = add(svg, "g", { style, "stroke-dasharray": each.dash ? "6 4" : "none" });
    let path = "";
    each.x.forEach((x, k) => {
      if (values[k] === null) { path += " "; return; }
      const next = k + 1 < each.x.length ? each.x[k + 1] : end;
      const begun = path && !path.endsWith(" ");
      path += `${begun ? "L" : "M"}${X(x).toFixed(1)},${Y(values[k]).toFixed(1)}`;
      if (each.steps) path += `L${X(next).toFixed(1)},${Y(values[k]).toFixed(1)}`;
      if (each.dots) add(svg, "circle", { cx: X(x), cy: Y(values[k]), r: each.dots[k] || 4, style: `fill:${each.colour}` });
    });
    if (path.trim()) add(group, "path", { d: path.trim() });
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    this.move(before(this.main.x, this.inverse(event.clientX - box.left)));
  }

  key(event) {
    const last = this.main.x.length - 1, page = Math.max(1, Math.round(last / 20)), at = this.at ?? 0;
    const to = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - page, PageUp: at + page, Home: 0, End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.move(to);
  }

  mark() {
    const x = this.X(this.main.x[this.at]);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
  }

  // Name and values of every line at a place; a stack has a column for its prediction.
  rows(place) {
    const shown = this.shown(), stack = shown.filter((each) => each.stack), other = shown.find((each) => each.kinds);
    const at = (each) => (each.x === this.main.x || each.stack ? this.at : before(each.x, place));
    const told = (kind) => (other.kinds[kind] ? other.kinds[kind][at(other)] : null);
    const found = [];
    if (stack.length) {
      const total = stack.reduce((sum, each) => sum + each.y[this.at], 0);
      found.push(["in all", total, ...(other ? [this.values(other)[at(other)]] : [])]);
    }
    for (const each of stack) {
      const values = [each.y[this.at], ...(other ? [told(each.name)] : [])];
      if (values.some((value) => value)) found.push([each.name, ...values]);
    }
    const known = new Set(this.data.series.map((each) => each.name));
    for (const kind of other ? Object.keys(other.kinds) : []) if (!known.has(kind)) found.push([kind, null, told(kind)]);
    for (const each of shown) if (!each.stack && !each.kinds && each.x.length) found.push([each.name, this.values(each)[at(each)]]);
    return found;
  }

  row(table, cells, tag) {
    const line = table.insertRow();
    cells.forEach((cell, k) => {
      const made = document.createElement(k ? tag : "th");
      if (k) made.className = "number";
      if (k && tag === "td") made.dataset.value = String(cell);
      made.textContent = k && tag === "td" ? (cell === null ? "\u2013" : this.format(cell)) : cell;
      line.append(made);
    });
  }

  move(to) {
    if (!this.main || !this.main.x.length) return;
    this.at = Math.min(Math.max(to, 0), this.main.x.length - 1);
    const place = this.main.x[this.at];
    this.mark();
    const title = document.createElement("b");
    title.textContent = this.data.label ? this.data.words[this.data.label[this.at]] : `${this.data.x_label} ${this.formatX(place)}`;
    const other = this.shown().find((each) => each.kinds);
    const told = document.createElement("div");
    told.className = "told";
    if (other) told.textContent = `predicted: ${other.words[other.label[before(other.x, place)]]}`;
    const rows = this.rows(place);
    const table = document.createElement("table");
    if (rows.some((row) => row.length > 2)) this.row(table, ["", this.data.total, "predicted"], "th");
    for (const [name, ...values] of rows) this.row(table, [name, ...values], "td");
    this.readout.replaceChildren(title, told, table);
    const said = rows.map(([name, value]) => `${name} ${value === null ? "unknown" : this.format(value)}`);
    this.plot.setAttribute("aria-valuemin", "0");
    this.plot.setAttribute("aria-valuemax", String(this.main.x.length - 1));
    this.plot.setAttribute("aria-valuenow", String(this.at));
    this.plot.setAttribute("aria-valuetext", `${title.textContent}: ${said.join(", ")}`);
  }
}

for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure);
document.documentElement.dataset.drawn = "yes";
