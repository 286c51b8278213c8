// The dashboard: asks every two seconds what runs have written, and shows it. Texts of runs are set as text, never as
// HTML; the body of a page comes from the server's templates, which escape.
"use strict";
(function () {
  if (!document.getElementById("runs")) return;
  var EVERY_MS = 2000;
  var chosen = new Set(new URLSearchParams(location.search).getAll("run"));
  var log = null, shownPage = "", known = [], first = true, wanted = false;

  function get(path) {
    return fetch(path, { credentials: "same-origin" }).then(function (answer) {
      if (!answer.ok) throw new Error(answer.status === 403 ? "the token is missing or wrong" : "the dashboard says " + answer.status);
      return answer.json();
    });
  }

  function query() {
    return Array.from(chosen).map(function (name) { return "run=" + encodeURIComponent(name); }).join("&");
  }

  function say(text) {
    var state = document.getElementById("state");
    if (state.textContent !== text) state.textContent = text;
  }

  function cell(row, text, header) {
    var made = document.createElement(header ? "th" : "td");
    if (header) made.scope = "row";
    made.textContent = text;
    row.append(made);
    return made;
  }

  function number(value, digits) {
    return value === null || value === undefined ? "–" : value.toFixed(digits);
  }

  function duration(seconds) {
    if (seconds === null) return "–";
    var whole = Math.round(seconds), minutes = Math.floor(whole / 60);
    if (whole < 60) return whole + " s";
    return minutes < 60 ? minutes + "m" + String(whole % 60).padStart(2, "0") + "s"
      : Math.floor(minutes / 60) + "h" + String(minutes % 60).padStart(2, "0") + "m";
  }

  function bytes(value) {
    if (!value) return "–";
    return value < 999.5e6 ? Math.round(value / 1e6) + " MB" : (value / 1e9).toPrecision(3) + " GB";
  }

  function stop(name, button) {
    if (!confirm("Stop " + name + "? It saves what it has learned, and can be resumed.")) return;
    button.disabled = true;
    fetch("/api/stop?run=" + encodeURIComponent(name), {
      method: "POST", credentials: "same-origin", headers: { "X-Allhands": "stop" },
    }).then(function (answer) { return answer.json(); }).then(function (told) {
      say(told.told || told.error);
    }).catch(function (error) { say(String(error.message || error)); button.disabled = false; });
  }

  // A cell of a run's row; on a narrow screen its label stands before it.
  function field(row, label, text) {
    var made = cell(row, text);
    made.setAttribute("role", "cell");
    made.dataset.label = label;
    return made;
  }

  function rowOf(run) {
    var row = document.createElement("tr"), first = cell(row, "", true), on = chosen.has(run.name);
    row.setAttribute("role", "row");
    row.className = on ? "chosen" : "";
    first.setAttribute("role", "rowheader");
    var label = document.createElement("label"), box = document.createElement("input"), name = document.createElement("span");
    box.type = "checkbox";
    box.checked = on;
    box.addEventListener("change", function () {
      if (box.checked) chosen.add(run.name); else chosen.delete(run.name);
      history.replaceState(null, "", chosen.size ? "?" + query() : location.pathname);
      shownPage = "";
      wanted = box.checked;
      look();
    });
    label.append(box);
    if (on) label.append(mark(Array.from(chosen).indexOf(run.name)));
    name.textContent = run.name;
    label.append(name);
    first.append(label);
    var status = document.createElement("span");
    status.className = "status " + run.status.replace(/ /g, "-");
    status.textContent = run.status;
    var state = field(row, "status", "");
    state.append(status);
    if (run.harm) {
      var harm = document.createElement("span");
      harm.className = "status harm";
      harm.textContent = run.harm;
      state.append(" ", harm);
    }
    field(row, "step", run.step + (run.total_steps ? " of " + run.total_steps : ""));
    field(row, "training loss", number(run.loss, 3));
    field(row, "validation loss", number(run.valid_loss, 3));
    field(row, "tokens/s", allhandsCharts.shown("rate", run.tokens_per_s));
    field(row, "training time", duration(run.trained_s)).className = "more";
    field(row, "memory", bytes(run.memory_bytes)).className = "more";
    field(row, "ranks", run.ranks === null ? "–" : String(run.ranks)).className = "more";
    var last = field(row, "", "");
    if (run.can_stop) {
      var button = document.createElement("button");
      button.type = "button";
      button.className = "stop";
      button.textContent = "Stop";
      button.setAttribute("aria-label", "Stop " + run.name);
      button.addEventListener("click", function () { stop(run.name, button); });
      last.append(button);
    }
    return row;
  }

  // The colour and the mark that a chosen run has in its curves.
  function mark(place) {
    return allhandsCharts.swatch({kind: "run", colour: place}, allhandsCharts.MARKS[place % allhandsCharts.MARKS.length]);
  }

  // The bar of parts: back to the list, the parts of the report, and what only a run that goes on has.
  function showParts(sections) {
    var nav = document.querySelector("nav.parts"), text = JSON.stringify(sections);
    nav.hidden = !sections.length;
    if (nav.dataset.shown === text) return;
    nav.dataset.shown = text;
    var all = [{key: "list", short: "Runs"}].concat(sections, {key: "ranks", short: "Processes"}, {key: "logs", short: "Logs"});
    nav.querySelector("ul").replaceChildren.apply(nav.querySelector("ul"), all.map(function (one) {
      var item = document.createElement("li"), link = document.createElement("a");
      link.href = "#" + one.key;
      link.textContent = one.short;
      item.append(link);
      return item;
    }));
  }

  // What has just been chosen comes into sight, unless it is there already.
  function bring() {
    var section = document.getElementById("chosen"), top = section.getBoundingClientRect().top;
    if (wanted && (top < 0 || top > 0.6 * innerHeight)) section.scrollIntoView({block: "start"});
    wanted = false;
  }

  function showRuns(runs) {
    var text = JSON.stringify([runs, Array.from(chosen)]), body = document.querySelector("#runs tbody");
    if (body.dataset.shown === text) return;
    // Whoever is at a box with the keyboard stays there.
    var at = document.activeElement, place = at && body.contains(at) ? Array.from(body.querySelectorAll("input, button")).indexOf(at) : -1;
    body.replaceChildren.apply(body, runs.map(rowOf));
    body.dataset.shown = text;
    if (place >= 0) {
      var places = body.querySelectorAll("input, button");
      if (places[place]) places[place].focus();
    }
  }

  function showProcesses(runs) {
    var host = document.getElementById("processes");
    host.replaceChildren.apply(host, runs.map(function (run) {
      var scroll = document.createElement("div"), table = document.createElement("table");
      scroll.className = "scroll";
      scroll.tabIndex = 0;
      var caption = table.createCaption();
      caption.textContent = run.name + (run.processes.length ? "" : ": no process has left samples");
      if (run.processes.length) {
        var names = Object.keys(run.processes[0]), head = table.createTHead().insertRow();
        names.forEach(function (name) { cell(head, name, true).scope = "col"; });
        var body = table.createTBody();
        run.processes.forEach(function (process) {
          var row = body.insertRow();
          names.forEach(function (name, place) { cell(row, process[name] || "–", place === 0); });
        });
      }
      scroll.append(table);
      return scroll;
    }));
  }

  function showLogs(runs) {
    var select = document.getElementById("log"), options = [];
    runs.forEach(function (run) {
      run.logs.forEach(function (name) { options.push([run.name, name]); });
    });
    var text = JSON.stringify(options);
    if (select.dataset.shown !== text) {
      select.dataset.shown = text;
      select.replaceChildren.apply(select, options.map(function (one) {
        var option = document.createElement("option");
        option.value = JSON.stringify(one);
        option.textContent = one[0] + ": " + one[1];
        return option;
      }));
      if (log) select.value = log;
      if (!select.value && options.length) select.selectedIndex = 0;
    }
    log = select.value || null;
    select.parentNode.hidden = !log;
    showTail();
  }

  function showTail() {
    var tail = document.getElementById("tail");
    if (!log) {
      tail.textContent = "There is no log: a run of one process writes to its terminal.";
      return;
    }
    var one = JSON.parse(log);
    get("/api/log?run=" + encodeURIComponent(one[0]) + "&log=" + encodeURIComponent(one[1])).then(function (told) {
      var text = told.text || "(nothing yet)";
      if (tail.textContent === text) return;
      var below = tail.scrollHeight - tail.scrollTop - tail.clientHeight < 20;
      tail.textContent = text;
      if (below) tail.scrollTop = tail.scrollHeight;
    }).catch(function (error) { tail.textContent = String(error.message || error); });
  }

  // Not while somebody reads a value, has a table open or has looked closer: then with the next look.
  function busy(host) {
    return host.contains(document.activeElement) || host.matches(":hover") && shownPage !== "";
  }

  function showPage(page) {
    var host = document.getElementById("page"), text = JSON.stringify([page.charts, page.html]);
    if (text === shownPage || busy(host)) return;
    var open = Array.from(host.querySelectorAll("details")).map(function (one) { return one.open; });
    allhandsCharts.forget();
    host.innerHTML = page.html;
    host.querySelectorAll("details").forEach(function (one, place) { one.open = Boolean(open[place]); });
    host.querySelectorAll("[data-chart]").forEach(function (plot) {
      allhandsCharts.draw(plot, page.charts[plot.dataset.chart]);
    });
    allhandsCharts.decorateText(host);
    shownPage = text;
  }

  // Without a choice in the address: what goes on, or the only run that there is.
  function begin(runs) {
    var going = runs.filter(function (run) { return run.status === "going on"; });
    (going.length ? going.slice(0, 4) : runs.length === 1 ? runs : []).forEach(function (run) { chosen.add(run.name); });
  }

  function look() {
    return get("/api/runs").then(function (runs) {
      known = runs;
      if (first && !chosen.size) begin(runs);
      first = false;
      showRuns(runs);
      var going = runs.filter(function (run) { return run.status === "going on"; }).length;
      say(runs.length ? runs.length + (runs.length === 1 ? " run, " : " runs, ") + going + " going on"
        : "There are no runs below this directory yet. A run appears on this page as soon as its training starts.");
      document.getElementById("list").hidden = !runs.length;
      var section = document.getElementById("chosen");
      chosen = new Set(Array.from(chosen).filter(function (name) {
        return known.some(function (run) { return run.name === name; });
      }));
      section.hidden = chosen.size === 0;
      if (!chosen.size) {
        showParts([]);
        return null;
      }
      return get("/api/page?" + query()).then(function (page) {
        showProcesses(page.runs);
        showLogs(page.runs);
        showPage(page);
        showParts(page.sections);
        bring();
      });
    }).catch(function (error) { say("No answer: " + String(error.message || error)); });
  }

  function again() {
    look().then(function () { setTimeout(again, EVERY_MS); });
  }

  document.getElementById("log").addEventListener("change", function (event) {
    log = event.target.value;
    showTail();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { allhandsCharts.redraw(); });
  allhandsCharts.follow(document.querySelector("nav.parts"));
  again();
})();
