// Long pages on a phone: sections below a heading of the second level fold, and open when they are the target of a link.
(() => {
  const MAX_SCREENS = 12;
  const page = document.querySelector("article.md-content__inner");
  if (!page || !matchMedia("(max-width: 600px)").matches) return;
  if (page.scrollHeight < MAX_SCREENS * innerHeight) return;

  const sections = [];
  for (const heading of [...page.querySelectorAll(":scope > h2")]) {
    const details = document.createElement("details");
    details.className = "fold";
    const summary = document.createElement("summary");
    heading.before(details);
    summary.append(heading);
    details.append(summary);
    while (details.nextSibling && details.nextSibling.nodeName !== "H2") details.append(details.nextSibling);
    sections.push(details);
  }
  // What a site adds below the text (its footer, a form) stays outside of the last section.
  const last = sections.at(-1);
  if (last) for (const child of [...last.children]) if (child.matches("aside, form, hr:last-child")) page.append(child);

  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const section = target && target.closest("details.fold");
    if (section) {
      section.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  open();
})();
