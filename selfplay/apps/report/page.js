// The page of runs: charts under the pointer, the list of games, keys.
const data = JSON.parse(find("data").textContent);

// --- charts
for (const figure of document.querySelectorAll(".chart")) {
  const chart = data.charts[figure.dataset.chart];
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), rule = make("div", { class: "rule", hidden: true });
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  plot.append(rule);
  plot.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect(), scale = area.width / width, [left, top, right, bottom] = chart.box;
    const at = chart.x[0] + ((event.clientX - area.left) / scale - left) / (right - left) * (chart.x[1] - chart.x[0]);
    const steps = chart.lines.flatMap((line) => line.points.map((point) => point[0]));
    if (!steps.length || at < chart.x[0] || at > chart.x[1]) { rule.hidden = true; hideTip(); return; }
    const step = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    const rows = chart.lines.map((line) => {
      const point = line.points.find((p) => p[0] === step), band = line.band.find((p) => p[0] === step);
      return point && `${line.name}  ${short(point[1])}${band ? ` [${short(band[1])}, ${short(band[2])}]` : ""}`;
    }).filter(Boolean);
    rule.hidden = false;
    rule.style.left = `${(left + (step - chart.x[0]) / (chart.x[1] - chart.x[0]) * (right - left)) * scale}px`;
    rule.style.top = `${top * scale}px`;
    rule.style.height = `${(bottom - top) * scale}px`;
    showTip(event, [`step ${step}`, ...rows].join("\n"));
  });
  plot.addEventListener("pointerleave", () => { rule.hidden = true; hideTip(); });
}

// --- the list of games
const games = data.games, state = { shown: [], current: -1, proposal: -1 };
const talkOf = (game) => game.turns.map((turn) => `${turn.thought || ""}\n${turn.text}`).join("\n").toLowerCase();
const shows = {
  all: () => true,
  errors: (game) => game.num_errors > 0,
  false: (game) => game.num_false > 0,
  undecided: (game) => !game.agreed,
  branches: (game) => game.turns.some((turn) => turn.branch),
};
const orders = {
  worst: (a, b) => a.score_norm - b.score_norm,
  best: (a, b) => b.score_norm - a.score_norm,
  changed: (a, b) => Math.abs(b.change || 0) - Math.abs(a.change || 0),
  latest: (a, b) => b.step - a.step,
};
const sourceOf = (game) => (data.runs.length > 1 ? `${data.runs[game.run]}: ${game.source}` : game.source);

function refilter(keep) {
  const source = find("source").value, words = find("search").value.trim().toLowerCase(), order = find("order").value;
  const chosen = games.map((game, place) => place).filter((place) => {
    const game = games[place];
    return (source === "all" || sourceOf(game) === source) && shows[find("show").value](game)
      && (order !== "changed" || game.change !== undefined) && (!words || talkOf(game).includes(words));
  });
  chosen.sort((a, b) => orders[order](games[a], games[b]) || a - b);
  state.shown = chosen;
  find("count").textContent = `${chosen.length} of ${games.length} games`;
  find("list").replaceChildren(...chosen.map((place, index) => {
    const game = games[place];
    return make("li", { "data-place": place, on: { click: () => open(place, true) } },
      make("b", {}, share(game.score_norm)),
      make("span", {},
        game.change ? make("em", { class: game.change > 0 ? "up" : "down" }, `${signed(game.change)} `) : null,
        [source === "all" && game.source !== "training" ? sourceOf(game) : null, game.source === "training" ? `step ${game.step}` : null,
          `${game.turns.length} turns`].filter(Boolean).join(", "),
        game.num_errors ? make("em", { class: "wrong" }, ` ${game.num_errors} ✗`) : null,
        game.num_false ? make("em", { class: "wrong" }, ` ${game.num_false} false`) : null));
  }));
  if (keep && chosen.includes(state.current)) open(state.current);
  else if (chosen.length) open(chosen[0]);
  else { state.current = -1; find("game").replaceChildren(make("p", { class: "panel quiet" }, "No game fits these filters.")); }
}

function open(place, scroll) {
  state.current = place;
  const proposals = proposalsOf(games[place]);
  state.proposal = proposals.length - 1;
  const list = find("list");
  for (const item of list.children) {
    const here = Number(item.dataset.place) === place;
    item.setAttribute("aria-current", here);
    // Scrolls the list alone, not the page.
    if (here) list.scrollTop = Math.max(Math.min(list.scrollTop, item.offsetTop), item.offsetTop + item.offsetHeight - list.clientHeight);
  }
  draw();
  if (scroll && innerWidth < 760) find("game").scrollIntoView();
}

function move(by) {
  if (!state.shown.length) return;
  const index = state.shown.indexOf(state.current);
  open(state.shown[Math.max(0, Math.min(state.shown.length - 1, index + by))]);
}

// --- one game
function draw() {
  const game = games[state.current];
  const pick = (number) => { state.proposal = number; draw(); };
  find("game").replaceChildren(headline(game), ...gamePanels(game, data.texts, state.proposal, pick));
}

function headline(game) {
  const good = game.score_norm > 1 - 1e-9, twin = game.twin !== undefined ? games[game.twin] : null;
  const facts = [
    game.agreed ? "agreed" : `no agreement${game.ended && game.ended !== "finished" ? ` (ended by ${game.ended})` : ""}`,
    `${game.turns.length} turns`, `${game.num_errors} refused`,
    game.rewards ? `rewards ${game.rewards.map(short).join(", ")}` : null,
    game.seat_scores && game.seat_scores.length ? `seat scores ${game.seat_scores.map(share).join(", ")}` : null,
    ...Object.entries(game.facts || {}).map(([name, value]) => `${name.replace(/_(\d+)$/, " of seat $1").replaceAll("_", " ")}: ${short(value)}`),
  ];
  return make("div", { class: "panel" },
    make("div", { class: "headline" },
      make("span", { class: `pill ${good ? "good" : game.agreed ? "" : "bad"}` }, `score ${share(game.score_norm)}`),
      make("h3", {}, game.source === "training" ? `${sourceOf(game)}, step ${game.step}` : `${sourceOf(game)} self-play`.replace(/(: .*) self-play$/, "$1")),
      twin ? make("span", { class: "quiet" }, game.source === "after" ? `was ${share(twin.score_norm)} before` : `becomes ${share(twin.score_norm)} after`) : null,
      twin ? make("button", { type: "button", id: "twin", on: { click: () => open(game.twin) } }, game.source === "after" ? "the same instance before" : "the same instance after") : null),
    make("div", { class: "facts" }, make("span", {}, `instance ${game.instance}`), facts.filter(Boolean).map((fact) => make("span", {}, fact))));
}

// --- keys
function cycle(select) {
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  refilter();
}
const keys = {
  j: () => move(1), k: () => move(-1), f: () => cycle(find("show")), o: () => cycle(find("order")),
  b: () => { const twin = games[state.current]?.twin; if (twin !== undefined) open(twin); },
  p: () => { const num = state.current < 0 ? 0 : proposalsOf(games[state.current]).length; if (num) { state.proposal = (state.proposal + 1) % num; draw(); } },
  t: () => find("game").classList.toggle("heatmap"),
  "/": () => find("search").focus(),
};
if (find("list")) {
  const sources = [...new Set(games.map(sourceOf))];
  find("source").append(...["all", ...sources].map((name) => make("option", { value: name }, name)));
  find("source").value = sources.find((name) => /(^|: )after$/.test(name)) || "all";
  for (const id of ["source", "show", "order"]) find(id).addEventListener("change", () => refilter());
  find("search").addEventListener("input", () => refilter());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const act = keys[event.key] || (event.target.id === "list" && { ArrowDown: keys.j, ArrowUp: keys.k }[event.key]);
    if (act) { event.preventDefault(); hideTip(); act(); }
  });
  refilter();
}
