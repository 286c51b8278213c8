// Draws charts of allhands with uPlot: colours of the page's theme, a legend of buttons, values by mouse and keyboard.
// A chart is {title, x, y, unit, whole, top, lines, marks, stars}, as allhands.report.charts.Chart.to_json gives it.
"use strict";
var allhandsCharts = (function () {
  var COLOURS = 7;
  var drawn = [];

  function theme(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  }

  function colour(number) {
    return theme("series-" + (number % COLOURS));
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
    if (unit === "rate") return value < 9.95 ? value.toFixed(1) : value.toFixed(0);
    if (unit === "small") {
      return value !== 0 && Math.abs(value) < 1e-3 ? Number(value.toPrecision(3)).toExponential() : digits(value, 3);
    }
    if (unit === "seconds") return digits(value, 3) + " s";
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

  function ticks(unit) {
    return function (u, values) {
      return values.map(function (value) {
        if (value === null) return "";
        if (unit === "bytes") return shown("bytes", value);
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
        ctx.strokeStyle = colour(mark[1]);
        ctx.lineWidth = 1.5 * ratio;
        ctx.setLineDash(dash(u, [2, 4]));
        ctx.beginPath();
        ctx.moveTo(x, box.top);
        ctx.lineTo(x, box.top + box.height);
        ctx.stroke();
      });
      ctx.restore();
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
        ctx.fillStyle = colour(star[2]);
        ctx.fill();
        ctx.strokeStyle = theme("background");
        ctx.lineWidth = ratio;
        ctx.stroke();
      });
      ctx.restore();
    };
  }

  function series(chart) {
    return chart.lines.map(function (line) {
      return {
        label: line.label,
        stroke: function () { return colour(line.colour); },
        width: line.width,
        alpha: line.faint ? 0.45 : 1,
        dash: line.dashed ? [6, 4] : undefined,
        points: { show: line.points, size: 7, fill: function () { return theme("background"); }, width: 2 },
      };
    });
  }

  function axes(chart) {
    var ink = function () { return theme("muted"); };
    var grid = { stroke: function () { return theme("grid"); }, width: 1 };
    var font = "12px system-ui, sans-serif";
    var common = { stroke: ink, grid: grid, ticks: grid, font: font, labelFont: font };
    return [
      Object.assign({ label: chart.x, labelSize: 20, size: 34, space: 70, values: ticks("count") }, common),
      Object.assign({ label: chart.y, labelSize: 20, size: chart.unit === "bytes" ? 66 : 58, values: ticks(chart.unit) }, common),
    ];
  }

  function legend(u, chart, list) {
    chart.lines.forEach(function (line, number) {
      if (line.faint) return;
      var item = document.createElement("li"), button = document.createElement("button");
      var swatch = document.createElement("span");
      swatch.className = "swatch s" + (line.colour % COLOURS) + (line.dashed ? " dashed" : "");
      swatch.setAttribute("aria-hidden", "true");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(swatch, line.label);
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
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }

  function redraw() {
    drawn.forEach(function (u) { u.redraw(false, true); });
  }

  // For a page that puts other charts in place of those that are there.
  function forget() {
    drawn.forEach(function (u) { u.destroy(); });
    drawn = [];
  }

  return { draw: draw, drawAll: drawAll, redraw: redraw, forget: forget };
})();
if (document.getElementById("charts")) allhandsCharts.drawAll();
