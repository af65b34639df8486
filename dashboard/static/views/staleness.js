// How old the trained tokens were, and what the correction did about it.
import {html, useState, useEffect, useMemo, useRun, useLive, get, api, css, stalenessColor, count, share, useTheme, Problem} from '/static/lib.js';
import {Chart} from '/static/chart.js';
import {Bars} from '/static/bars.js';
import {openStep} from '/static/views/curves.js';

const METRICS = [['ess', 'effective sample size'], ['kl', 'KL behavior ‖ current, nats'], ['clip_fraction', 'clipped share'], ['weight', 'importance weight of a token, 1 for the average']];
const OVER_STEPS = [['ess_by_staleness', 'effective sample size'], ['kl_by_staleness', 'KL behavior ‖ current, nats'], ['clip_fraction_by_staleness', 'clipped share of tokens'], ['staleness_tokens', 'tokens trained']];

export function Staleness({run}) {
  const {data, error} = useRun(run.name, 'staleness');
  const change = useLive().changes[run.name], dark = useTheme(), [curves, setCurves] = useState();
  const ages = data ? Object.keys(data.tokens).map(Number).sort((a, b) => a - b) : [];
  useEffect(() => {
    if (!ages.length) return;
    let wanted = true;
    const names = [...OVER_STEPS.flatMap(([metric]) => ages.map(age => `${metric}/${age}`)), 'mismatch_max', 'canary'];
    get(api(run.name, 'curves', {names: names.join(',')})).then(found => wanted && setCurves(found), () => {});
    return () => { wanted = false; };
  }, [ages.join(), change]);
  const charts = useMemo(() => !curves ? [] : [...OVER_STEPS.map(([metric, title]) => [title, ages.map(age => [`${metric}/${age}`, `staleness ${age}`, stalenessColor(age)])]),
    ['difference of learner and engine, nats', [['mismatch_max', 'mismatch, tokens of staleness 0', css('blue')], ['canary', 'canary after a push', css('orange')]]]]
    .map(([title, lines]) => ({title, lines: lines.filter(([name]) => curves.columns[name]?.some(value => value))}))
    .filter(chart => chart.lines.length)
    .map(({title, lines}) => ({title, tables: [[curves.steps, ...lines.map(([name]) => curves.columns[name])]], lines: lines.map(([, label, color]) => ({label, color}))})), [curves, dark]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const total = ages.reduce((sum, age) => sum + data.tokens[age], 0);
  if (!total) return html`<h1>${run.name}</h1><div class="card">No token has been trained on.</div>`;
  const pick = step => openStep(run.name, curves, step);
  return html`<h1>${run.name}</h1><div class="cards">
      <${Bars} title="trained tokens by staleness" label="staleness" note=${`In ${data.steps} steps; the bound is ${data.bound ?? 'not known'}. Staleness is the learner's version less the version that sampled the token.`}
        rows=${ages.map(age => ({name: String(age), href: `#/${encodeURIComponent(run.name)}/trajectories?staleness_min=${age}`, parts: [{value: data.tokens[age], color: stalenessColor(age)}], text: `${count(data.tokens[age])}, ${share(data.tokens[age] / total)}`}))} />
      ${METRICS.filter(([name]) => Object.values(data.metrics[name]).some(value => value)).map(([name, title]) => html`<${Bars} key=${name} title=${title} label="staleness"
        rows=${Object.entries(data.metrics[name]).map(([age, value]) => ({name: age, parts: [{value, color: stalenessColor(+age)}], text: count(value)}))} />`)}
      ${charts.map(chart => html`<${Chart} key=${chart.title} ...${chart} sync="steps" pick=${pick} />`)}
    </div><p class="muted small">A histogram of the ratios themselves, and the mismatch of each replica: not recorded.</p>`;
}
