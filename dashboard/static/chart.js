// Lines over steps or seconds. Drag to zoom, double-click to see all; a click opens what was trained at that step.
import {html, useEffect, useRef, useTheme, css, count, share} from '/static/lib.js';

const HEIGHT = 190;

/* `marks`: {x, text, color} where a setting changed. `tables`: [x, y...] for each run, joined by x. `lines`: {label, color, dash, points, width} of each y, in the same order.
   `unit` is % for shares. `pick(x)` is called with the x that was clicked. */
export function Chart({title, note, tables, lines, marks = [], unit, sync, pick}) {
  const ref = useRef(), made = useRef(), dark = useTheme();
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const key = JSON.stringify(lines.map(line => [line.label, line.color]));
  useEffect(() => {
    const format = unit === '%' ? share : count;
    const axis = {stroke: css('muted'), grid: {stroke: css('grid'), width: 1}, ticks: {show: false}, font: '11px ' + css('font')};
    const plot = made.current = new uPlot({
      width: ref.current.clientWidth || 380, height: HEIGHT,
      scales: {x: {time: false}, ...(unit === '%' ? {y: {range: [0, 1]}} : {})},
      hooks: {draw: [drawMarks]},
      cursor: {sync: {key: sync}, drag: {x: true, y: false}, focus: {prox: 30}},
      axes: [{...axis, size: 30}, {...axis, size: 52, values: (_, ticks) => ticks.map(format)}],
      series: [{label: sync === 'seconds' ? 'second' : 'step', value: (_, x) => x == null ? '' : String(+x.toFixed(2))},
        ...lines.map(line => ({
          label: line.label, stroke: line.color, width: line.width ?? 1.6, dash: line.dash, spanGaps: !line.points,
          paths: line.points ? () => null : undefined,
          points: line.points ? {show: true, size: 7, fill: line.color} : {show: data[0].length < 12, size: 5},
          value: (_, y) => y == null ? '' : format(y),
        }))],
    }, data, ref.current);
    let pressed = 0;
    plot.over.addEventListener('mousedown', event => { pressed = event.clientX; });
    plot.over.addEventListener('click', event => {
      const at = plot.cursor.idx;
      if (plot.pick && at != null && Math.abs(event.clientX - pressed) < 3) plot.pick(plot.data[0][at]);
    });
    const observer = new ResizeObserver(([entry]) => plot.setSize({width: Math.max(120, entry.contentRect.width), height: HEIGHT}));
    observer.observe(ref.current);
    return () => { observer.disconnect(); plot.destroy(); };
  }, [key, dark, unit, sync]);
  useEffect(() => {
    const plot = made.current, {min, max} = plot.scales.x, shown = plot.data[0];
    const zoomed = shown.length > 1 && (min > shown[0] || max < shown[shown.length - 1]);
    plot.pick = pick;
    plot.marks = marks;
    if (plot.data !== data) { plot.setData(data, !zoomed); if (zoomed) plot.setScale('x', {min, max}); }
  });
  useEffect(() => { made.current.marks = marks; made.current.redraw(false); }, [JSON.stringify(marks)]);
  return html`<div class="card" data-chart=${title}><h2>${title}</h2><div ref=${ref}></div>${note && html`<p class="legend-note">${note}</p>`}</div>`;
}

// A dotted line for each mark, with its text where there are few.
function drawMarks(plot) {
  const {ctx, bbox, marks = []} = plot, ratio = devicePixelRatio, {min, max} = plot.scales.x;
  ctx.save();
  ctx.setLineDash([2 * ratio, 3 * ratio]);
  ctx.font = `${10 * ratio}px ${css('font')}`;
  ctx.textAlign = 'left';
  ctx.textBaseline = 'alphabetic';
  for (const {x, text, color} of marks) {
    if (x < min || x > max) continue;
    const at = Math.round(plot.valToPos(x, 'x', true));
    ctx.strokeStyle = ctx.fillStyle = color;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    if (marks.length > 6) continue;
    ctx.save();
    ctx.translate(at - 3 * ratio, bbox.top + bbox.height - 4 * ratio);
    ctx.rotate(-Math.PI / 2);
    ctx.fillText(text, 0, 0, bbox.height - 8 * ratio);
    ctx.restore();
  }
  ctx.restore();
}

// Mean over a tenth of the steps around each, narrower at both ends, as in the report.
export function smooth(values) {
  const half = Math.max(1, Math.floor(values.length / 20)), last = values.length - 1;
  return values.map((_, i) => {
    const reach = Math.min(half, i, last - i);
    const near = values.slice(i - reach, i + reach + 1).filter(y => y != null);
    return near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}
