"use strict";
(() => {
  const root = document.getElementById("samples");
  const { rows, kinds, metrics } = JSON.parse(document.getElementById("samples-data").textContent);
  const element = (name) => root.querySelector(`[data-is="${name}"]`);
  const [list, one, count, problem] = ["list", "one", "count", "problem"].map(element);
  const [where, step, sort, by] = ["where", "step", "sort", "by"].map(element);
  const versionColors = ["blue", "orange", "violet", "teal", "pink", "yellow"];
  let shown = [];
  let current = null;

  const made = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (tag === "bdi") node.dir = "ltr";
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const number = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : String(+value.toPrecision(3)));

  // The filter: the grammar of `megatron-rl samples --where`, read here and never run as code.
  function parse(text) {
    const pattern = /\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([A-Za-z_]\w*)|(<=|>=|==|!=|[<>()[\],=-]))/y;
    const tokens = [];
    while (pattern.lastIndex < text.trimEnd().length) {
      const start = pattern.lastIndex;
      const match = pattern.exec(text);
      if (!match) throw Error(`cannot read ${text.slice(start).trim().slice(0, 20)}`);
      const [, digits, quoted, word, sign] = match;
      if (digits !== undefined) tokens.push({ kind: "number", value: Number(digits) });
      else if (quoted !== undefined) tokens.push({ kind: "text", value: quoted.slice(1, -1).replace(/\\(.)/g, "$1") });
      else if (word !== undefined) tokens.push({ kind: "word", value: word });
      else tokens.push({ kind: "sign", value: sign });
    }
    let at = 0;
    const is = (value) => tokens[at] && tokens[at].kind !== "text" && tokens[at].value === value;
    const take = (value) => (is(value) ? (at += 1) : 0);
    const expect = (value) => { if (!take(value)) throw Error(`expected ${value} ${tokens[at] ? `before ${tokens[at].value}` : "at the end"}`); };
    // Three values: true, false and null, where something is missing.
    const either = () => { const parts = [both()]; while (take("or")) parts.push(both()); return (row) => parts.reduce((sum, part) => { const now = part(row); return sum === true || now === true ? true : sum === null || now === null ? null : false; }, false); };
    const both = () => { const parts = [negated()]; while (take("and")) parts.push(negated()); return (row) => parts.reduce((sum, part) => { const now = part(row); return sum === false || now === false ? false : sum === null || now === null ? null : true; }, true); };
    const negated = () => {
      if (!take("not")) return compared();
      const inner = negated();
      return (row) => { const now = inner(row); return now === null ? null : !now; };
    };
    const value = () => {
      const minus = take("-");
      const token = tokens[at];
      at += 1;
      if (!token) throw Error("it ends where a value is expected");
      if (token.kind === "number") return { kind: "number", get: () => (minus ? -token.value : token.value) };
      if (minus) throw Error("only numbers have a minus");
      if (token.kind === "text") return { kind: "text", constant: true, get: () => token.value };
      if (token.value === "True" || token.value === "False") return { kind: "bool", get: () => token.value === "True" };
      if (token.value === "None") return { kind: "none", get: () => null };
      if (token.kind !== "word") throw Error(`expected a value before ${token.value}`);
      if (metrics.includes(token.value)) return { kind: "number", column: true, get: (row) => row.metrics[token.value] ?? null };
      if (!(token.value in kinds)) throw Error(`column ${token.value} does not exist; columns are ${[...Object.keys(kinds), ...metrics].sort().join(", ")}`);
      return { kind: kinds[token.value], column: true, get: (row) => row[token.value] ?? null };
    };
    const listed = () => {
      const close = take("(") ? ")" : (expect("["), "]");
      const values = [];
      while (!take(close)) { values.push(value().get()); if (!is(close)) expect(","); }
      return values;
    };
    const compared = () => {
      if (take("(")) { const inner = either(); expect(")"); return inner; }
      let left = value();
      const parts = [];
      for (;;) {
        const start = left;
        if (take("is")) {
          const no = take("not");
          expect("None");
          parts.push((row) => (start.get(row) === null) !== Boolean(no));
          break;
        }
        const no = is("not") && take("not");
        if (no || is("in")) {
          expect("in");
          if (is("(") || is("[")) { const values = listed(); parts.push((row) => (start.get(row) === null ? null : values.includes(start.get(row)) !== Boolean(no))); break; }
          const right = value();
          if (!start.constant || !right.column || right.kind !== "text") throw Error("in needs 'words' in a column of texts, or a column in a list");
          parts.push((row) => (right.get(row) === null ? null : right.get(row).includes(start.get(row)) !== Boolean(no)));
          break;
        }
        const sign = ["<=", ">=", "==", "!=", "<", ">"].find(take);
        if (!sign) {
          if (is("=")) throw Error("equality is ==");
          if (!parts.length) { if (start.kind !== "bool") throw Error("compare it with something"); parts.push((row) => start.get(row)); }
          break;
        }
        const right = value();
        if (right.kind === "none") { parts.push((row) => (start.get(row) === null) === (sign === "==")); left = right; continue; }
        if (right.kind !== start.kind) throw Error(`a ${start.kind} is compared with a ${right.kind}`);
        const test = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "==": (a, b) => a === b, "!=": (a, b) => a !== b }[sign];
        parts.push((row) => { const [a, b] = [start.get(row), right.get(row)]; return a === null || b === null ? null : test(a, b); });
        left = right;
      }
      return (row) => parts.reduce((sum, part) => { const now = part(row); return sum === false || now === false ? false : sum === null || now === null ? null : true; }, true);
    };
    const found = either();
    if (at < tokens.length) throw Error(`${tokens[at].value} is too much`);
    return found;
  }

  function numbers(text) { return text.split(",").map((part) => (part === "" ? NaN : Number(part))); }
  function largest(values) {
    const sizes = values.filter((value) => !Number.isNaN(value)).map(Math.abs).sort((a, b) => a - b);
    return sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1 : 0;
  }
  const tint = (color, share) => `color-mix(in srgb, var(--${color}) ${Math.round(8 + 57 * Math.min(1, share))}%, transparent)`;

  function list_row(row) {
    const button = made("button");
    button.type = "button";
    const head = made("span", "", `${row.step}/${row.id}`);
    if (row.type) head.append(made("span", "numbers", ` ${row.type}`));
    const reward = row.reward === null ? (row.error ? "not scored" : row.finished ? "" : "unfinished") : `reward ${number(row.reward)}`;
    button.append(head, made("span", "", reward));
    button.append(made("span", "numbers", `${row.parts.length ? `${row.num_turns} turns, ` : ""}${row.length} tokens${row.advantage === null ? "" : `, advantage ${number(row.advantage)}`}`), made("span"));
    const end = made("span", "end");
    end.append(made("bdi", "", row.response.slice(-160).replace(/\s+/g, " ")));
    button.append(end);
    button.addEventListener("click", () => choose(row));
    button.row = row;
    return button;
  }

  function filter() {
    let keeps = () => true;
    problem.textContent = "";
    where.removeAttribute("aria-invalid");
    try { if (where.value.trim()) keeps = parse(where.value); } catch (error) {
      problem.textContent = `${error.message}. Like: reward < 0.5 and length > 200 · 'boxed' in response · not finished · reward is None`;
      where.setAttribute("aria-invalid", "true");
      keeps = null;
    }
    if (keeps) {
      const [column, order] = sort.value.split(":");
      const value = (row) => (column === "step" ? row.step : row[column]);
      shown = rows.filter((row) => (!step.value || row.step === Number(step.value)) && keeps(row) === true);
      shown.sort((a, b) => (value(a) === null) - (value(b) === null) || (order === "desc" ? value(b) - value(a) : value(a) - value(b)) || a.group - b.group || a.sample - b.sample);
    }
    list.replaceChildren(...shown.map(list_row));
    if (!shown.length) list.append(made("p", "", "No response here fits the filter."));
    count.textContent = `${shown.length} of ${rows.length}`;
    choose(shown.includes(current) ? current : shown[0] || null, false);
  }

  function choose(row, scrolls = true) {
    current = row;
    for (const button of list.querySelectorAll("button")) {
      if (button.row === row) { button.setAttribute("aria-current", "true"); if (scrolls) button.scrollIntoView({ block: "nearest" }); } else button.removeAttribute("aria-current");
    }
    one.replaceChildren(...(row ? response(row) : []));
    remember();
  }

  function facts(row) {
    const ends = { stop: "ended naturally", length: "truncated at its budget", room: "truncated before a message", open: "unfinished" };
    const reward = [row.reward === null ? (row.finished ? "not scored" : "not finished") : number(row.reward), row.detail, row.error];
    const stretches = row.ver.map(([tokens, version, step]) => (version === null ? `${tokens} of a message` : `${tokens} in step ${step} by weights ${version}`));
    return [
      ["prompt", [row.prompt_id, row.type].filter(Boolean).join(" · ")],
      ["answer", row.answer],
      ["reward", reward.filter(Boolean).join(" · ")],
      ...Object.entries(row.metrics).map(([name, value]) => [name, number(value)]),
      ["dialogue", row.parts.length || row.parent !== null ? [`${row.num_turns} turns`, row.waited_s === null ? "" : `${number(row.waited_s)} s of the environment`, row.parent === null ? "" : `a further row of the episode of response ${row.parent}`].filter(Boolean).join(" · ") : ""],
      ["tokens", `${row.length}, ${ends[row.end]}; ${row.new_tokens} sampled and ${row.trained_tokens} trained in this step`],
      ["advantage", row.advantage === null ? "" : `${number(row.advantage)} (mean of the trained tokens)`],
      ["mismatch", row.mismatch === null ? "" : `${number(row.mismatch)} (mean of |trainer's − server's log-prob|)`],
      ["sampled", stretches.join("; ")],
      ["", row.greedy ? "a greedy response: a baseline, which trains nothing" : ""],
    ].filter(([, value]) => value);
  }

  function response(row) {
    const table = made("dl");
    for (const [name, value] of facts(row)) table.append(made("dt", "", name), made("dd", "", value));
    const title = made("h4", "", `response`);
    const [text, legend] = tokens(row);
    title.append(legend);
    return [made("h3", "", `Step ${row.step}, response ${row.id} (group ${row.group}, sample ${row.sample})`), table, made("h4", "", "prompt"), made("pre", "text given", row.prompt), title, text];
  }

  function tokens(row) {
    const text = made("pre", "text");
    const legend = made("span", "legend");
    const [ends, advantages, server, apart] = [row.ends, row.adv, row.lp, row.diff].map(numbers);
    const values = by.value === "advantage" ? advantages : apart;
    const scale = largest(values);
    const key = (background, words) => { const item = made("span", "", words); const box = made("i"); box.style.background = background; item.prepend(box); legend.append(item); };
    if (by.value === "version") {
      for (const version of new Set(row.ver.map((part) => part[1]))) if (version !== null) key(tint(versionColors[version % versionColors.length], 0.6), `weights ${version}`);
    } else if (scale) {
      if (by.value === "advantage") { key(tint("green", 1), `+${number(scale)}`); key(tint("red", 1), `−${number(scale)}`); } else key(tint("orange", 1), `${number(scale)} nats apart`);
      key("transparent", by.value === "advantage" ? "not trained in this step" : "not computed in this step");
    }
    let start = 0;
    let place = 0;
    const titles = new Map(row.parts);
    let [part, left] = [0, row.ver.length ? row.ver[0][0] : 0];
    ends.forEach((end, index) => {
      if (index === row.head && row.left_out) {
        text.append(made("span", "gap", `\n… ${row.left_out} tokens are left out here: megatron-rl samples RUN --show ${row.step}/${row.id} …\n`));
        place += row.left_out;
        for (let skip = row.left_out; skip > 0;) { const taken = Math.min(skip, left); skip -= taken; left -= taken; if (!left && part + 1 < row.ver.length) { part += 1; left = row.ver[part][0]; } else if (!left) break; }
      }
      while (!left && part + 1 < row.ver.length) { part += 1; left = row.ver[part][0]; }
      left -= 1;
      if (titles.has(place)) text.append(made("span", "turn", titles.get(place)));
      const [, version, sampled] = row.ver[part] || [0, null, null];
      const span = made("span", "", row.response.slice(start, start + end));
      const value = values[index];
      if (by.value === "version") { if (version !== null) span.style.background = tint(versionColors[version % versionColors.length], 0.6); } else if (!Number.isNaN(value) && scale) span.style.background = value === 0 ? "" : tint(by.value === "advantage" ? (value > 0 ? "green" : "red") : "orange", Math.abs(value) / scale);
      span.title = [`token ${place}`, Number.isNaN(advantages[index]) ? "" : `advantage ${number(advantages[index])}`, Number.isNaN(server[index]) ? "" : `server ${number(server[index])}`,
        Number.isNaN(apart[index]) ? "" : `trainer ${apart[index] < 0 ? "−" : "+"}${number(Math.abs(apart[index]))}`, version === null ? "a message" : `weights ${version}, step ${sampled}`].filter(Boolean).join(" · ");
      text.append(span);
      start += end;
      place += 1;
    });
    return [text, legend];
  }

  function remember() {
    const state = { sample: current ? `${current.step}/${current.id}` : "", by: by.value, where: where.value, step: step.value, sort: sort.value };
    const kept = Object.entries(state).filter(([name, value]) => value && !(name === "by" && value === "advantage") && !(name === "sort" && value === "step:desc"));
    try { if (ready) history.replaceState(null, "", `#${new URLSearchParams(kept)}`); } catch (error) { /* some viewers allow no history */ }
  }

  for (const stored of [...new Set(rows.map((row) => row.step))].sort((a, b) => b - a)) { const option = made("option", "", `step ${stored}`); option.value = stored; step.append(option); }
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, node] of Object.entries({ by, where, step, sort })) if (wanted.get(name)) node.value = wanted.get(name);
  let ready = false;
  filter();
  const named = rows.find((row) => `${row.step}/${row.id}` === wanted.get("sample"));
  if (named) { choose(named); root.scrollIntoView(); }
  ready = true;
  where.addEventListener("input", filter);
  for (const node of [step, sort]) node.addEventListener("change", filter);
  by.addEventListener("change", () => choose(current, false));
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const next = move && shown[shown.indexOf(current) + move];
    if (!next) return;
    event.preventDefault();
    choose(next);
    list.querySelector("[aria-current]").focus();
  });
})();
