// The page of runs: charts under the pointer, the list of games, links to games, keys.
const data = JSON.parse(find("data").textContent);

const nearest = (values, at) => (values.length ? values.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a)) : undefined);

// --- charts
// A chart shows the values of a step under the pointer, or, with the keyboard, at the arrow keys.
const kinds = { training: (game) => game.source === "training" };
const stepWithGames = (step) => nearest(data.games.filter(kinds.training).map((game) => game.step), step);
for (const figure of document.querySelectorAll(".chart")) {
  const chart = data.charts[figure.dataset.chart], steps = [...new Set(chart.lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), rule = make("div", { class: "rule", hidden: true });
  const [, , width] = svg.getAttribute("viewBox").split(" ").map(Number), [left, top, right, bottom] = chart.box;
  let shown;
  plot.append(rule);
  const leave = () => { shown = undefined; rule.hidden = true; hideTip(); };
  const stepAt = (event) => {
    const area = svg.getBoundingClientRect(), scale = area.width / width;
    const at = chart.x[0] + ((event.clientX - area.left) / scale - left) / (right - left) * (chart.x[1] - chart.x[0]);
    return at < chart.x[0] || at > chart.x[1] ? undefined : nearest(steps, at);
  };
  const show = (step, event) => {
    if (step === undefined) return leave();
    const area = svg.getBoundingClientRect(), scale = area.width / width;
    const x = (left + (step - chart.x[0]) / (chart.x[1] - chart.x[0]) * (right - left)) * scale;
    const rows = chart.lines.map((line) => {
      const point = line.points.find((p) => p[0] === step), band = line.band.find((p) => p[0] === step);
      return point && `${line.name}  ${short(point[1])}${band ? ` [${short(band[1])}, ${short(band[2])}]` : ""}`;
    }).filter(Boolean);
    const kept = chart.games ? stepWithGames(step) : undefined;
    shown = step;
    rule.hidden = false;
    rule.style.left = `${x}px`;
    rule.style.top = `${top * scale}px`;
    rule.style.height = `${(bottom - top) * scale}px`;
    showTip(event || { clientX: area.left + x, clientY: area.top + top * scale }, [`step ${step}`, ...rows, kept !== undefined && `click: games of step ${kept}`].filter(Boolean).join("\n"));
  };
  const follow = (step) => { leave(); if (chart.games && step !== undefined) openStep(step); };
  plot.addEventListener("click", (event) => {
    const step = stepAt(event), read = step === shown && !tip.hidden;
    if (event.pointerType === "touch" && !read) show(step, event);  // the first touch shows the values
    else follow(step);
  });
  plot.addEventListener("pointermove", (event) => { if (event.pointerType !== "touch") show(stepAt(event), event); });
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") leave(); });
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key], at = steps.indexOf(shown);
    if (event.key === "Enter" && shown !== undefined) follow(shown);
    else if (by) show(steps[Math.max(0, Math.min(steps.length - 1, at < 0 ? (by < 0 ? steps.length - 1 : 0) : at + by))]);
    else return;
    event.preventDefault();
  });
}
addEventListener("scroll", hideTip, { passive: true });

const whole = document.querySelector("button.all");
if (whole) whole.addEventListener("click", () => whole.setAttribute("aria-pressed", String(document.querySelector(".beside").classList.toggle("whole"))));

// --- the list of games
const games = data.games, state = { shown: [], current: -1, proposal: -1, beside: -1 };
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
  group: (a, b) => !credited(a) - !credited(b) || a.step - b.step || (a.instance < b.instance ? -1 : a.instance > b.instance ? 1 : a.episode - b.episode),
};
// A game of a group: its seats have reward, return and advantage.
const credited = (game) => game.seats.some((seat) => seat.reward !== undefined);
const groupOf = (game) => (credited(game) ? games.map((_, place) => place).filter((place) => {
  const other = games[place];
  return credited(other) && ["run", "step", "instance", "source"].every((name) => other[name] === game[name]);
}).sort((a, b) => games[a].episode - games[b].episode) : []);
// An order for each of the game's own counts of moves.
const measures = [...new Set(games.flatMap((game) => Object.keys(game.measures)))];
for (const name of measures) orders[`most ${name}`] = (a, b) => (b.measures[name] ?? -1e300) - (a.measures[name] ?? -1e300);
const sourceOf = (game) => (data.runs.length > 1 ? `${data.runs[game.run]}: ${game.source}` : game.source);

function refilter(keep) {
  const source = find("source").value, words = find("search").value.trim().toLowerCase(), order = find("order").value, step = find("step").value.trim();
  const chosen = games.map((game, place) => place).filter((place) => {
    const game = games[place];
    return (source === "all" || sourceOf(game) === source) && (!step || game.step === Number(step)) && shows[find("show").value](game)
      && (order !== "changed" || game.change !== undefined) && (!words || talkOf(game).includes(words));
  });
  chosen.sort((a, b) => orders[order](games[a], games[b]) || a - b);
  state.shown = chosen;
  find("count").textContent = `${chosen.length} of ${games.length} games`;
  find("list").replaceChildren(...chosen.map((place, index) => {
    const game = games[place];
    return make("li", { "data-place": place, on: { click: () => pick(place) } },
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

// A game that the reader chose: the page's address leads to it from now on.
function pick(place) {
  open(place);
  find("missing").hidden = true;
  history.replaceState(null, "", `#game=${encodeURIComponent(nameOf(games[place]))}`);
  if (innerWidth < 760) find("game").scrollIntoView();
}
const nameOf = (game) => [sourceOf(game), game.step, game.instance, game.episode].join("/");

// The game in the page's address, regardless of the filters.
function openLinked() {
  if (!location.hash.startsWith("#game=") || !find("list")) return;
  let name = "";
  try { name = decodeURIComponent(location.hash.slice(6)); } catch { return; }
  const place = games.findIndex((game) => nameOf(game) === name);
  find("missing").hidden = place >= 0;
  find("missing").textContent = `The page no longer has the game ${name}: it keeps ${games.filter(kinds.training).length} games of training, from all over the run.`;
  if (place < 0) return;
  find("source").value = sourceOf(games[place]);
  for (const id of ["search", "step"]) find(id).value = "";
  find("show").value = "all";
  refilter();
  open(place);
  if (performance.getEntriesByType("navigation")[0]?.type !== "reload") find("games").scrollIntoView();
}

// The games of training nearest to a step, from a point of a curve.
function openStep(step) {
  const kept = stepWithGames(step);
  if (kept === undefined) return;
  find("source").value = data.runs.length > 1 ? "all" : "training";
  find("step").value = kept;
  find("show").value = "all";
  find("search").value = "";
  find("order").value = "group";
  refilter();
  find("games").scrollIntoView();
}

function open(place) {
  state.current = place;
  const proposals = proposalsOf(games[place]);
  state.proposal = proposals.length - 1;
  const list = find("list");
  for (const item of list.children) {
    const here = Number(item.dataset.place) === listed();
    item.setAttribute("aria-current", here);
    // Scrolls only the list, not the page.
    if (here) list.scrollTop = Math.max(Math.min(list.scrollTop, item.offsetTop), item.offsetTop + item.offsetHeight - list.clientHeight);
  }
  draw();
}

// The place of the current game in the list, or of its twin if only that is listed.
const listed = () => (state.shown.includes(state.current) ? state.current : games[state.current]?.twin);

function move(by) {
  if (!state.shown.length) return;
  const index = state.shown.indexOf(listed());
  const place = state.shown[Math.max(0, Math.min(state.shown.length - 1, index + by))];
  if (place !== state.current) pick(place);
}

// --- one game
function draw() {
  const game = games[state.current];
  const choose = (number) => { state.proposal = number; draw(); };
  const values = heat.mode ? game.turns.flatMap((turn) => valuesOf(turn, heat.mode)).filter((n) => typeof n === "number") : [];
  heat.most = Math.max(0, ...values.map(Math.abs));
  const other = games[rivals(game).find((place) => games[place].run === state.beside)];
  const panels = [headline(game), ...group(game), ...gamePanels(game, data.texts, state.proposal, choose)];
  // The same instance in another run, beside it.
  find("game").replaceChildren(...(other ? [make("div", { class: "pair" }, make("div", {}, panels),
    make("div", { id: "beside" }, headline(other), ...gamePanels(other, data.texts, proposalsOf(other).length - 1, () => {})))] : panels));
  // Scrolls only the group, not the page.
  const strip = document.querySelector(".group"), card = strip?.querySelector("[aria-current=true]");
  if (card) strip.scrollLeft = card.offsetLeft - (strip.clientWidth - card.clientWidth) / 2;
}

// All games of the instance in this step, side by side: each seat's reward, return and advantage, and
// the talk in short.
function group(game) {
  const places = groupOf(game);
  if (places.length < 2) return [];
  const seats = game.seats.map((_, seat) => seat).filter((seat) => places.some((place) => games[place].seats[seat].reward !== undefined));
  const means = seats.map((seat) => {
    const rewards = places.map((place) => games[place].seats[seat].reward).filter((reward) => reward !== undefined);
    return `${seatName(game, seat)} ${short(rewards.reduce((a, b) => a + b, 0) / rewards.length)}`;
  });
  return [make("div", { class: "panel" },
    make("div", { class: "who" }, `The ${places.length} games of this instance in step ${game.step}`, make("small", {}, `mean reward: ${means.join(", ")}`)),
    make("div", { class: "group" }, places.map((place) => {
      const one = games[place];
      return make("div", { class: "card", "aria-current": String(place === state.current), on: { click: () => pick(place) } },
        make("div", { class: "headline" }, make("button", { type: "button" }, `game ${one.episode}`), make("span", { class: `pill ${one.agreed ? "" : "bad"}` }, share(one.score_norm))),
        make("table", {}, make("tr", {}, ["", "reward", "return", "adv."].map((name) => make("th", { class: name && "num" }, name))),
          seats.map((seat) => make("tr", { class: seatClass(seat) }, make("td", { class: "who" }, seatName(one, seat)),
            make("td", { class: "num" }, short(one.seats[seat].reward)), make("td", { class: "num" }, short(one.seats[seat].return)),
            worth(one.seats[seat].advantage)))),
        one.turns.map((turn) => make("div", { class: `line ${seatClass(turn.seat)} ${turn.error ? "refused" : ""}`, title: turn.text }, turn.text || "(nothing)")));
    })),
    make("p", { class: "key" }, "Return: mean over the seat's sampled tokens of the rewards still to come. Advantage: mean over the same tokens; – if all games of the seat here have the same return and train nothing, or if a critic computes it."))];
}

function worth(advantage) {
  if (advantage === undefined) return make("td", { class: "num" }, "–");
  return make("td", { class: `num worth ${advantage < 0 ? "less" : "more"}`, style: { "--v": `${Math.min(60, 30 * Math.abs(advantage))}%` } }, (advantage > 0 ? "+" : "") + advantage.toFixed(2));
}

// A number of each seat, or the one that all have.
const ofSeats = (game, name, values, form) => (!values || !values.length ? null : values.every((one) => one === values[0]) ? `${name} ${form(values[0])} each`
  : `${name}s ${values.map((one, seat) => `${seatName(game, seat)} ${form(one)}`).join(", ")}`);

function headline(game) {
  const good = game.score_norm > 1 - 1e-9, twin = game.twin !== undefined ? games[game.twin] : null;
  const facts = [
    game.agreed ? "agreed" : `no agreement${game.ended && game.ended !== "finished" ? ` (ended by ${game.ended})` : ""}`,
    `${game.turns.length} turns`, `${game.num_errors} refused`,
    ofSeats(game, "reward", game.rewards, short), ofSeats(game, "score", game.seat_scores, share),
    ...Object.entries({ ...game.facts, ...game.measures }).map(([name, value]) => `${name.replaceAll("_", " ")}: ${short(value)}`),
    game.judge ? `judge: ${game.judge}` : null,
  ];
  return make("div", { class: "panel" },
    make("div", { class: "headline" },
      make("span", { class: `pill ${good ? "good" : game.agreed ? "" : "bad"}` }, `score ${share(game.score_norm)}`),
      make("h3", {}, game.source === "training" ? `${sourceOf(game)}, step ${game.step}` : `${sourceOf(game)} self-play`.replace(/(: .*) self-play$/, "$1")),
      twin ? make("span", { class: "quiet" }, game.source === "after" ? `was ${share(twin.score_norm)} before` : `becomes ${share(twin.score_norm)} after`) : null,
      twin ? make("button", { type: "button", id: "twin", title: "b", on: { click: () => pick(game.twin) } }, game.source === "after" ? "the same instance before" : "the same instance after") : null),
    make("div", { class: "facts" }, make("span", { title: game.instance }, `instance ${game.instance.replace(/^\d{7,}[-/]/, "")}`), facts.filter(Boolean).map((fact) => make("span", {}, fact))), besides(game), colours(game));
}

// The games of the same instance in other runs, from the same source, step and place.
const rivals = (game) => (data.runs.length < 2 ? [] : games.map((_, place) => place).filter((place) => {
  const other = games[place];
  return other.run !== game.run && ["instance", "source", "step", "episode"].every((name) => other[name] === game[name]);
}));
function besides(game) {
  const places = state.current >= 0 && games[state.current] === game ? rivals(game) : [];
  if (!places.length) return null;
  return make("div", { class: "heat", role: "group", "aria-label": "the same instance in another run" }, "beside",
    places.map((place) => make("button", { type: "button", "aria-pressed": String(games[place].run === state.beside), on: { click: () => { state.beside = state.beside === games[place].run ? -1 : games[place].run; draw(); } } }, `${data.runs[games[place].run]} ${share(games[place].score_norm)}`)));
}

// The buttons that colour the tokens of a game by a number, with the colours' scale.
const heatsOf = (game) => Object.keys(heats).filter((name) => game.turns.some((turn) => valuesOf(turn, name).length));
function colours(game) {
  if (!game.turns.some((turn) => turn.tokens)) return null;
  const has = heatsOf(game), scale = has.includes(heat.mode) && heats[heat.mode];
  const why = "only of games of games.jsonl whose tokens trained";
  return make("div", { class: "heat", role: "group", "aria-label": "colours of tokens" }, "colour tokens by",
    Object.keys(heats).map((name) => make("button", { type: "button", "aria-pressed": String(heat.mode === name), disabled: !has.includes(name), title: has.includes(name) ? heats[name].what : why, on: { click: () => paint(heat.mode === name ? "" : name) } }, name)),
    scale ? make("span", { class: "scale" }, scale.low(), make("i", { style: { background: scale.strip } }), scale.high()) : null);
}
function paint(mode) { heat.mode = mode; draw(); }

// --- keys
function cycle(select) {
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  refilter();
}
const keys = {
  j: () => move(1), k: () => move(-1), f: () => cycle(find("show")), o: () => cycle(find("order")),
  b: () => { const twin = games[state.current]?.twin; if (twin !== undefined) pick(twin); },
  p: () => { const num = state.current < 0 ? 0 : proposalsOf(games[state.current]).length; if (num) { state.proposal = (state.proposal + 1) % num; draw(); } },
  t: () => { const modes = ["", ...(state.current < 0 ? [] : heatsOf(games[state.current]))]; paint(modes[(modes.indexOf(heat.mode) + 1) % modes.length]); },
  "/": () => find("search").focus(),
};
if (find("list")) {
  const sources = [...new Set(games.map(sourceOf))];
  find("source").append(...["all", ...sources].map((name) => make("option", { value: name }, name)));
  find("order").append(...measures.map((name) => make("option", { value: `most ${name}` }, `most ${name.replaceAll("_", " ")}`)));
  find("source").value = sources.find((name) => /(^|: )after$/.test(name)) || "all";
  for (const id of ["source", "show", "order"]) find(id).addEventListener("change", () => refilter());
  for (const id of ["search", "step"]) find(id).addEventListener("input", () => refilter());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const act = keys[event.key] || (event.target.id === "list" && { ArrowDown: keys.j, ArrowUp: keys.k }[event.key]);
    if (act) { event.preventDefault(); hideTip(); act(); }
  });
  refilter();
}
openLinked();
addEventListener("hashchange", openLinked);

// --- the page of a running run: its age, and the next page as soon as nobody reads this one
const opened = Date.now();
let touched = 0;
for (const event of ["pointermove", "keydown", "wheel", "touchstart"]) addEventListener(event, () => { touched = Date.now(); }, { passive: true });
function age() {
  const seconds = Date.now() / 1000 - data.drawn, minutes = Math.floor(seconds / 60);
  const news = minutes < 1 ? "" : minutes < 120 ? `(${minutes} min ago)` : `(${Math.floor(minutes / 60)} h ago)`;
  for (const node of document.querySelectorAll(".age")) node.textContent = news;
  for (const node of document.querySelectorAll(".state.running")) node.textContent = seconds < data.due_s ? "running" : "was running";
  if (data.running && document.visibilityState === "visible" && Date.now() - Math.max(opened, touched) > 60_000) location.reload();
}
age();
setInterval(age, 10_000);
