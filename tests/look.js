const found = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; frame.src = page; });
  const inside = frame.contentDocument, root = inside.documentElement;
  const scrolls = [...inside.querySelectorAll("article *")].filter(e =>
    e.scrollWidth > e.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(e).overflowX));
  const named = e => `${e.tagName}, ${e.scrollWidth} in ${e.clientWidth}: ${e.textContent.trim()}`.slice(0, 120);
  found.push({page, width, wide: root.scrollWidth - root.clientWidth, scrolls: scrolls.map(named)});
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await look(page, width);
  document.body.append(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
})();
