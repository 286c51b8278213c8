// Draws charts of allhands with uPlot: colours of the page's theme, a legend of buttons, values by mouse and keyboard.
// A chart is {title, x, y, unit, whole, top, lines, marks, stars}, as allhands.observe.charts.Chart.to_json gives it.
"use strict";
var allhandsCharts = (function () {
  var COUNTS = {run: 6, rank: 6, director: 2, phase: 10, ink: 1};
  // Marks of the first, second, ... run or rank, in a box from -1 to 1; the same as in the pictures.
  var MARKS = [
    "M1 0A1 1 0 1 1 -1 0A1 1 0 1 1 1 0Z", "M-.9 -.9H.9V.9H-.9Z", "M0 -1L1 .8H-1Z", "M0 -1.15L1.15 0L0 1.15L-1.15 0Z",
    "M0 1L1 -.8H-1Z", "M-.35 -1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z",
    "M-1 -.5L-.5 -1L0 -.5L.5 -1L1 -.5L.5 0L1 .5L.5 1L0 .5L-.5 1L-1 .5L-.5 0Z",
  ];
  // Between marks of an axis of whole numbers.
  var WHOLE = [];
  for (var power = 1; power < 1e15; power *= 10) WHOLE.push(power, 2 * power, power > 1 ? 2.5 * power : 3, 5 * power);
  var APART = 110;  // pixels between the marks of a line
  var drawn = [];

  function theme(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  function key(line) {
    var kind = line.kind || "run";
    return kind + "-" + (line.colour % COUNTS[kind]);
  }

  function colour(line) {
    return theme(key(line));
  }

  function ofRun(number) {
    return colour({kind: "run", colour: number});
  }

  // Who directs the ranks is dotted; a smoothed, a validation's and a whole's line are as they are told to be.
  function pattern(line) {
    return line.kind === "director" ? [2, 3] : line.dashed ? [6, 4] : undefined;
  }

  // The mark of a line; none for one that no other line of the same kind is beside.
  function markOf(chart, line) {
    if (line.kind === "director" || line.kind === "ink" || line.faint) return null;
    var many = line.points || chart.lines.some(function (other) { return key(other) !== key(line); });
    return many ? MARKS[line.colour % MARKS.length] : null;
  }

  function digits(value, count) {
    return String(Number(value.toPrecision(count)));
  }

  // A height as a person reads it; the same units as the tables have.
  function shown(unit, value) {
    if (value === null || value === undefined) return "–";
    if (unit === "bytes") {
      return Math.abs(value) < 999.5e6 ? Math.round(value / 1e6) + " MB" : digits(value / 1e9, 3) + " GB";
    }
    if (unit === "size") {
      if (value < 1e3) return value.toFixed(0) + " B";
      if (value < 999950) return (value / 1e3).toFixed(1) + " kB";
      return value < 9.95e6 ? (value / 1e6).toFixed(1) + " MB" : shown("bytes", value);
    }
    if (unit === "rate") return value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
    if (unit === "small") {
      return value !== 0 && Math.abs(value) < 1e-3 ? Number(value.toPrecision(3)).toExponential() : digits(value, 3);
    }
    if (unit === "seconds") {
      return value !== 0 && Math.abs(value) < 0.01 ? digits(1e3 * value, 3) + " ms" : digits(value, 3) + " s";
    }
    return value.toFixed(4);
  }

  function place(chart, x) {
    return chart.whole ? Math.round(x).toLocaleString("en") : digits(x, 4);
  }

  function short(number) {
    var size = Math.abs(number);
    if (size >= 1e9) return digits(number / 1e9, 4) + " B";
    if (size >= 1e6) return digits(number / 1e6, 4) + " M";
    return size >= 1e4 ? digits(number / 1e3, 4) + " k" : digits(number, 6);
  }

  // A round number of bytes at an axis, with the digits that it has.
  function bytesMark(value) {
    var size = Math.abs(value);
    if (size < 1e6) return size < 1e3 ? digits(value, 4) + " B" : digits(value / 1e3, 4) + " kB";
    return size < 999.5e6 ? digits(value / 1e6, 4) + " MB" : digits(value / 1e9, 4) + " GB";
  }

  function ticks(unit) {
    return function (u, values) {
      return values.map(function (value) {
        if (value === null) return "";
        if (unit === "bytes" || unit === "size") return bytesMark(value);
        if (unit === "small" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
        return short(value);
      });
    };
  }

  // The value of a series nearest to a place of the joined axis, where it may have none itself.
  function nearest(u, series, index) {
    var heights = u.data[series];
    for (var away = 0; away < heights.length; away++) {
      var left = index - away, right = index + away;
      if (left >= 0 && heights[left] !== undefined && heights[left] !== null) return left;
      if (right < heights.length && heights[right] !== undefined && heights[right] !== null) return right;
    }
    return -1;
  }

  function dash(u, pattern) {
    return pattern.map(function (length) { return length * uPlot.pxRatio; });
  }

  // Restarts over the whole height, the best validations as stars.
  function decorate(chart) {
    return function (u) {
      var ctx = u.ctx, box = u.bbox, ratio = uPlot.pxRatio;
      ctx.save();
      ctx.beginPath();
      ctx.rect(box.left, box.top, box.width, box.height);
      ctx.clip();
      chart.marks.forEach(function (mark) {
        var x = u.valToPos(mark[0], "x", true);
        ctx.strokeStyle = ofRun(mark[1]);
        ctx.lineWidth = 1.5 * ratio;
        ctx.setLineDash(dash(u, [2, 4]));
        ctx.beginPath();
        ctx.moveTo(x, box.top);
        ctx.lineTo(x, box.top + box.height);
        ctx.stroke();
      });
      ctx.restore();
      chart.lines.forEach(function (line, number) {
        var shape = markOf(chart, line);
        if (shape && u.series[number + 1].show) marks(u, line, number + 1, shape);
      });
      ctx.save();
      chart.stars.forEach(function (star) {
        var x = u.valToPos(star[0], "x", true), y = u.valToPos(star[1], "y", true), size = 8 * ratio;
        if (x < box.left || x > box.left + box.width || y < box.top || y > box.top + box.height) return;
        ctx.beginPath();
        for (var point = 0; point < 10; point++) {
          var angle = (Math.PI * point) / 5 - Math.PI / 2, far = point % 2 ? size * 0.45 : size;
          ctx.lineTo(x + far * Math.cos(angle), y + far * Math.sin(angle));
        }
        ctx.closePath();
        ctx.fillStyle = ofRun(star[2]);
        ctx.fill();
        ctx.strokeStyle = theme("background");
        ctx.lineWidth = ratio;
        ctx.stroke();
      });
      ctx.restore();
    };
  }

  // A mark at every point of a validation, and now and then on other lines, so that no line is told by its colour alone.
  function marks(u, line, number, shape) {
    var ctx = u.ctx, ratio = uPlot.pxRatio, box = u.bbox, path = new Path2D(shape), heights = u.data[number];
    var size = (line.points ? 4 : 3.5) * ratio, next = box.left + ((line.colour * 37) % APART) * ratio * 0.5;
    ctx.save();
    ctx.strokeStyle = colour(line);
    ctx.fillStyle = theme("background");
    ctx.lineWidth = 2 * ratio / size;
    for (var index = 0; index < heights.length; index++) {
      if (heights[index] === null || heights[index] === undefined) continue;
      var x = u.valToPos(u.data[0][index], "x", true), y = u.valToPos(heights[index], "y", true);
      if (x < box.left - 1 || x > box.left + box.width + 1 || y < box.top - 1 || y > box.top + box.height + 1) continue;
      if (!line.points && x < next) continue;
      next = x + APART * ratio;
      ctx.save();
      ctx.translate(x, y);
      ctx.scale(size, size);
      ctx.fill(path);
      ctx.stroke(path);
      ctx.restore();
    }
    ctx.restore();
  }

  function svg(name, attributes) {
    var made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.keys(attributes).forEach(function (key) { made.setAttribute(key, attributes[key]); });
    return made;
  }

  // A piece of a line as it is drawn, for a legend.
  function swatch(line, shape) {
    var made = svg("svg", {"class": "swatch c-" + key(line), viewBox: "0 0 24 12", "aria-hidden": "true"});
    var dashes = pattern(line);
    made.append(svg("path", dashes ? {d: "M0 6H24", "stroke-dasharray": dashes.join(" ")} : {d: "M0 6H24"}));
    if (shape) mark(made, shape);
    return made;
  }

  function mark(made, shape) {
    made.append(svg("path", {d: shape, "class": "mark", transform: "translate(12 6) scale(4)", "vector-effect": "non-scaling-stroke"}));
  }

  // What a page's own text has besides its charts: marks of its runs, and bars.
  function decorateText(host) {
    fitBars(host);
    host.querySelectorAll("svg[data-mark]").forEach(function (made) {
      if (!made.querySelector(".mark")) mark(made, MARKS[made.dataset.mark % MARKS.length]);
    });
  }

  // Names in bars only where they have room; the legend above them has all.
  function fitBars(host) {
    host.querySelectorAll(".bar svg svg").forEach(function (part) {
      var name = part.querySelector("text");
      if (!name) return;
      name.removeAttribute("visibility");
      var room = part.parentNode.getBoundingClientRect().width * parseFloat(part.getAttribute("width")) / 100;
      if (name.getComputedTextLength() + 10 > room) name.setAttribute("visibility", "hidden");
    });
  }

  function series(chart) {
    return chart.lines.map(function (line) {
      return {
        label: line.label,
        stroke: function () { return colour(line); },
        width: line.width,
        alpha: line.faint ? 0.45 : 1,
        dash: pattern(line),
        points: { show: false },
      };
    });
  }

  function axes(chart) {
    var ink = function () { return theme("muted"); };
    var grid = { stroke: function () { return theme("grid"); }, width: 1 };
    var font = "12px system-ui, sans-serif";
    var common = { stroke: ink, grid: grid, ticks: grid, font: font, labelFont: font };
    var whole = chart.whole ? { incrs: WHOLE } : {};
    return [
      Object.assign({ label: chart.x, labelSize: 20, size: 34, space: 55, values: ticks("count") }, whole, common),
      Object.assign({ label: chart.y, labelSize: 20, size: room, values: ticks(chart.unit) }, common),
    ];
  }

  // What the longest of an axis's numbers needs, so that they do not run into its name.
  function room(u, values, axis, cycle) {
    if (cycle > 1) return u.axes[axis]._size;
    var longest = (values || []).reduce(function (most, text) { return Math.max(most, String(text).length); }, 0);
    return Math.max(44, 7 * longest + 24);
  }

  function legend(u, chart, list) {
    var named = chart.lines.filter(function (line) { return !line.faint; });
    if (named.length < 2) return;  // nothing to tell apart, and nothing else to see
    chart.lines.forEach(function (line, number) {
      if (line.faint) return;
      var item = document.createElement("li"), button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(swatch(line, markOf(chart, line)), line.label);
      button.addEventListener("click", function () {
        var show = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(show));
        u.setSeries(number + 1, { show: show });
        var following = chart.lines[number + 1];
        if (following && following.faint) u.setSeries(number + 2, { show: show });
      });
      item.append(button);
      list.append(item);
    });
  }

  // What the cursor points at, in words below the chart.
  function tell(chart, readout) {
    return function (u) {
      var index = u.cursor.idx;
      if (index === null || index === undefined) {
        readout.textContent = "";
        return;
      }
      var told = [];
      chart.lines.forEach(function (line, number) {
        if (line.faint || !u.series[number + 1].show) return;
        var at = nearest(u, number + 1, index);
        if (at >= 0) {
          var where = at === index ? "" : " (at " + place(chart, u.data[0][at]) + ")";
          told.push(line.label + " " + shown(chart.unit, u.data[number + 1][at]) + where);
        }
      });
      readout.textContent = chart.x + " " + place(chart, u.data[0][index]) + ": " + told.join("; ");
    };
  }

  function keys(u, host, readout) {
    var at = -1;
    host.addEventListener("keydown", function (event) {
      var last = u.data[0].length - 1;
      var from = at < 0 ? -1 : at;
      var to = {
        ArrowLeft: at < 0 ? last : at - 1, ArrowRight: from + 1, PageUp: from - 10, PageDown: from + 10, Home: 0, End: last,
      }[event.key];
      if (event.target !== host || to === undefined) return;
      event.preventDefault();
      readout.setAttribute("aria-live", "polite");
      at = Math.min(last, Math.max(0, to));
      u.setCursor({ left: u.valToPos(u.data[0][at], "x"), top: u.over.clientHeight / 2 });
    });
    host.addEventListener("blur", function () {
      at = -1;
      readout.setAttribute("aria-live", "off");
    });
  }

  function height(width) {
    return width < 500 ? 260 : 320;
  }

  // Draws a chart into an element, which it then fills whatever its width becomes.
  function draw(host, chart) {
    var readout = document.createElement("p"), list = document.createElement("ul");
    readout.className = "readout";
    list.className = "legend";
    var options = {
      width: host.clientWidth,
      height: height(host.clientWidth),
      legend: { show: false },
      cursor: { y: false, points: { show: false } },
      scales: chart.top ? { x: { time: false }, y: { range: [0, chart.top] } } : { x: { time: false } },
      series: [{ label: chart.x }].concat(series(chart)),
      axes: axes(chart),
      hooks: { draw: [decorate(chart)], setCursor: [tell(chart, readout)] },
    };
    var tables = chart.lines.map(function (line) { return [line.x, line.y]; });
    var u = new uPlot(options, uPlot.join(tables), host);
    legend(u, chart, list);
    host.after(list, readout);
    keys(u, host, readout);
    new ResizeObserver(function () {
      if (host.clientWidth && host.clientWidth !== u.width) {
        u.setSize({ width: host.clientWidth, height: height(host.clientWidth) });
      }
    }).observe(host);
    drawn.push(u);
    host.dataset.drawn = "yes";
    return u;
  }

  // Draws every element with data-chart from the JSON of the page.
  function drawAll() {
    var charts = JSON.parse(document.getElementById("charts").textContent);
    document.querySelectorAll("[data-chart]").forEach(function (host) {
      draw(host, charts[host.dataset.chart]);
    });
    decorateText(document);
    follow(document.querySelector("nav.parts"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  addEventListener("resize", function () { fitBars(document); });

  // The bar says which part of the page is in sight.
  function follow(nav) {
    if (!nav) return;
    var waiting = false, wanted = null;  // the part that somebody has just asked for
    function look() {
      waiting = false;
      if (wanted) wanted.scrollIntoView();
      var current = null, line = nav.getBoundingClientRect().bottom + innerHeight / 4;
      nav.querySelectorAll("a").forEach(function (link) {
        var part = document.querySelector(link.getAttribute("href"));
        if (part && part.getClientRects().length && part.getBoundingClientRect().top <= line) current = link;
      });
      nav.querySelectorAll("a").forEach(function (link) {
        if (link === current && !link.hasAttribute("aria-current")) {
          link.setAttribute("aria-current", "true");
          nav.scrollLeft = link.offsetLeft - nav.clientWidth / 3;
        } else if (link !== current) link.removeAttribute("aria-current");
      });
    }
    function soon() {
      if (!waiting) requestAnimationFrame(look);
      waiting = true;
    }
    nav.addEventListener("click", function (event) {
      var link = event.target.closest("a");
      wanted = link && document.querySelector(link.getAttribute("href"));
      setTimeout(function () { wanted = null; }, 2000);
      soon();
    });
    ["wheel", "touchmove", "keydown"].forEach(function (kind) {
      addEventListener(kind, function () { wanted = null; }, {passive: true});
    });
    addEventListener("scroll", soon, {passive: true});
    new ResizeObserver(soon).observe(document.body);  // what is above may grow while nobody scrolls
    look();
  }

  function redraw() {
    drawn.forEach(function (u) { u.redraw(false, true); });
  }

  // For a page that puts other charts in place of those that are there.
  function forget() {
    drawn.forEach(function (u) { u.destroy(); });
    drawn = [];
  }

  return {
    draw: draw, shown: shown, drawAll: drawAll, redraw: redraw, forget: forget, follow: follow, decorateText: decorateText, swatch: swatch, MARKS: MARKS,
  };
})();
if (document.getElementById("charts")) allhandsCharts.drawAll();
