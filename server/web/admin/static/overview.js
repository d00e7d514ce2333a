// Draws the charts of the overview. The page contains the numbers twice: for this script and as tables. Colours are read
// from the legend, so that only the styles define them.
(() => {
  "use strict";
  const HEIGHT = 208;
  const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [4, 2]];
  const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
  // Counts of calls and tokens are whole numbers.
  const WHOLE = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power));
  const place = document.getElementById("charts");
  if (!place) return;
  const sheet = JSON.parse(place.dataset.sheet);

  const two = (number) => String(number).padStart(2, "0");
  const dayOf = (moment) => `${moment.getUTCDate()} ${MONTHS[moment.getUTCMonth()]}`;
  const hourOf = (moment) => `${two(moment.getUTCHours())}:${two(moment.getUTCMinutes())}`;

  const short = (number) => {
    if (number >= 1e9) return `${+(number / 1e9).toPrecision(3)}G`;
    if (number >= 1e6) return `${+(number / 1e6).toPrecision(3)}M`;
    if (number >= 1e4) return `${+(number / 1e3).toPrecision(3)}k`;
    return String(+number.toPrecision(3));
  };
  const write = {
    count: (number) => short(number),
    usd: (number) => `$${short(number)}`,
    share: (number) => `${+(number * 100).toPrecision(3)}%`,
    seconds: (number) => `${short(number)} s`,
  };

  const onAxis = (seconds) => {
    const moment = new Date(seconds * 1000);
    const isMidnight = moment.getUTCHours() === 0 && moment.getUTCMinutes() === 0;
    return sheet.step === "day" || isMidnight ? dayOf(moment) : hourOf(moment);
  };
  const inWords = (seconds) => {
    const moment = new Date(seconds * 1000);
    return sheet.step === "day" ? dayOf(moment) : `${dayOf(moment)}, ${hourOf(moment)} UTC`;
  };

  const readPalette = (plot) => ({
    lines: [...place.querySelectorAll(".swatch")].map((swatch) => getComputedStyle(swatch).color),
    text: getComputedStyle(plot).color,
    grid: getComputedStyle(plot).borderTopColor,
    font: `12px ${getComputedStyle(plot).fontFamily}`,
  });

  // The values of the lines at the pointer. Names are set as text, never as markup.
  const fillReading = (reading, plot, chart, palette) => {
    const index = plot.cursor.idx;
    reading.hidden = index == null || !plot.over.matches(":hover");
    if (reading.hidden) return;
    const list = document.createElement("dl");
    chart.lines.forEach((line, number) => {
      const [mark, name, figure] = ["i", "dt", "dd"].map((tag) => document.createElement(tag));
      mark.style.color = palette.lines[number];
      name.textContent = sheet.names[number];
      figure.textContent = line[index] == null ? "–" : write[chart.unit](line[index]);
      list.append(mark, name, figure);
    });
    const when = document.createElement("strong");
    when.textContent = inWords(sheet.steps[index]);
    reading.replaceChildren(when, list);
    const isLeft = plot.cursor.left > plot.over.clientWidth / 2;
    reading.style.left = isLeft ? "4.5rem" : "auto";
    reading.style.right = isLeft ? "auto" : "0.5rem";
  };

  const draw = (box) => {
    const chart = sheet.charts.find((each) => each.measure === box.dataset.measure);
    const palette = readPalette(box);
    const reading = document.createElement("div");
    reading.className = "reading";
    reading.hidden = true;
    const axis = { stroke: palette.text, font: palette.font, grid: { stroke: palette.grid, width: 1 }, ticks: { show: false } };
    const top = (_plot, _low, high) => (chart.unit === "share" ? [0, 1] : uPlot.rangeNum(0, high > 0 ? high : 1, 0.1, true));
    const series = chart.lines.map((_line, number) => ({
      label: sheet.names[number],
      stroke: palette.lines[number],
      dash: DASHES[number],
      width: 2,
      points: { size: 5, fill: palette.lines[number] },
    }));
    const plot = new uPlot(
      {
        width: box.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
        cursor: { sync: { key: "overview" }, y: false, drag: { x: false, y: false } },
        scales: { y: { range: top } },
        axes: [
          { ...axis, size: 28, space: 64, values: (_plot, splits) => splits.map(onAxis), grid: { show: false } },
          { ...axis, size: 60, incrs: chart.unit === "count" ? WHOLE : undefined, values: (_plot, splits) => splits.map((split) => write[chart.unit](split)) },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(drawn) => fillReading(reading, drawn, chart, palette)] },
      },
      [sheet.steps, ...chart.lines],
      box,
    );
    box.append(reading);
    return plot;
  };

  const boxes = [...place.querySelectorAll(".plot")];
  let drawn = new Map();
  const drawAll = () => {
    drawn.forEach((plot) => plot.destroy());
    boxes.forEach((box) => box.replaceChildren());
    drawn = new Map(boxes.map((box) => [box, draw(box)]));
  };
  boxes.forEach((box) => {
    box.hidden = false;
  });
  drawAll();

  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) drawn.get(target)?.setSize({ width: target.clientWidth, height: HEIGHT });
  });
  boxes.forEach((box) => sizes.observe(box));
  // Colours change with the theme.
  new MutationObserver(drawAll).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
