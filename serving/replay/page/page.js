const settings = {
  responsive: true, displaylogo: false,
  modeBarButtonsToRemove: ["pan2d", "select2d", "lasso2d", "autoScale2d", "sendChartToCloud"],
};
const draw = box => {
  if (box.dataset.drawn) return;
  box.dataset.drawn = "yes";
  const {data, layout} = JSON.parse(box.querySelector("script").textContent);
  const style = getComputedStyle(box.parentElement);
  layout.font.color = style.color;
  layout.hoverlabel = {...layout.hoverlabel, bgcolor: style.backgroundColor, font: {color: style.color}};
  Plotly.newPlot(box.appendChild(document.createElement("div")), data, layout, settings);
};
const boxes = [...document.querySelectorAll(".chart")];
const seen = new IntersectionObserver(
  entries => entries.filter(one => one.isIntersecting).forEach(one => draw(one.target)), {rootMargin: "400px"});
boxes.forEach(box => seen.observe(box));
addEventListener("beforeprint", () => boxes.forEach(draw));
