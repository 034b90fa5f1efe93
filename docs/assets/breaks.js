// Identifiers in the text break after _ . / = and commas only, and short cells of tables stay on one line.
(() => {
  for (const cell of document.querySelectorAll("article table:not([class]) :is(td, th)"))
    if (cell.textContent.trim().length <= 12) cell.classList.add("short");

  for (const code of document.querySelectorAll("article :not(pre) > code, nav .md-ellipsis, article h3 code")) {
    if (code.closest("pre") || code.querySelector("wbr")) continue;
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) texts.push(walker.currentNode);
    for (const text of texts) {
      const parts = text.data.split(/(?<=[_./=,])(?=\w)/);
      if (parts.length > 1) text.replaceWith(...parts.flatMap((part, n) => (n ? [document.createElement("wbr"), part] : [part])));
    }
  }
})();
