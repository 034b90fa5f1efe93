// The selector of what_fits.html: model, machine and task -> the row that the planner wrote, and a config to copy.
(() => {
  const place = document.getElementById("what-fits");
  const source = document.getElementById("rows");
  if (!place || !source) return;
  const { tasks, machines, configs, rows } = JSON.parse(source.textContent);

  const element = (name, text, parent) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const chosen = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const pick = (key, label, choices, parent) => {
    const field = element("label", `${label} `, parent);
    const select = element("select", "", field);
    select.name = key;
    for (const [value, text] of choices) element("option", text, select).value = value;
    const wanted = chosen.get(key);
    if (choices.some(([value]) => value === wanted)) select.value = wanted;
    return select;
  };

  place.replaceChildren();
  const form = element("form", "", place);
  const present = (key) => [...new Set(rows.map((row) => row[key]))];
  const selects = {
    model: pick("model", "Model", present("model").map((name) => [name, name]), form),
    machine: pick("machine", "Machine", Object.entries(machines).map(([name, { title }]) => [name, title]), form),
    task: pick("task", "Task", present("task").map((name) => [name, tasks[name]]), form),
  };
  const answer = element("div", "", place);
  answer.setAttribute("aria-live", "polite");

  const config = (row) => {
    const drives = row.nvme ? machines[row.machine].drives : 0;
    const lines = Array.from({ length: drives }, (_, n) => `[[tiers.nvme]]\npath = "/mnt/drive${n}/state"\n`).join("");
    return configs[row.task]
      .replaceAll("MODEL", row.model)
      .replace("SPLIT", row.split ? "split_experts = true\n" : "")
      .replace("DRIVES", lines);
  };

  const show = () => {
    const wanted = Object.fromEntries(Object.entries(selects).map(([key, select]) => [key, select.value]));
    const row = rows.find((each) => Object.keys(wanted).every((key) => each[key] === wanted[key]));
    answer.replaceChildren();
    if (!row) {
      element("p", "The planner has no row of this choice.", answer);
      return;
    }
    if (row.missing) {
      const [tier, sizes] = row.missing.split(": ");
      element("p", `Does not fit: ${tier} needs ${sizes.replace(" of ", ", the machine has ")}.`, answer);
      return;
    }
    const table = element("table", "", answer);
    const line = (name, value) => {
      if (!value) return;
      const parts = element("tr", "", table);
      element("th", name, parts).scope = "row";
      element("td", value, parts);
    };
    line("fits", row.split ? "yes, with experts in parts" : "yes");
    line("GPU memory", row.gpu);
    line("RAM", row.ram);
    line("drives", row.nvme || "not needed");
    line("read from the model's folder", row.folder);
    line("tokens/s, predicted", row.tokens_per_s);
    line("bound by", row.bound_by);
    line("T*, tokens per step", row.crossing_tokens);
    line("days per 10^9 tokens", row.days);
    const life = row.life ? `${row.written}, ${row.life} of the drives' endurance` : row.written;
    line("written per 10^9 tokens", life);
    const text = config(row);
    const head = element("p", "Config: ", answer);
    const button = element("button", "Copy", head);
    button.type = "button";
    button.className = "md-button";
    const block = element("pre", "", answer);
    element("code", text, block);
    button.onclick = async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(block); // a page of file:// in some browsers
        button.textContent = "Selected: press Ctrl-C";
      }
    };
  };
  form.onchange = show;
  show();
})();
