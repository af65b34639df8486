// The answers in an exported page, which has no server: those of the run as it was, and a sample of its trajectories.
const element = document.getElementById('recorded');
export const recorded = element ? JSON.parse(element.textContent) : null;

const AT_LEAST = {reward_min: 'reward', turns_min: 'turns', tokens_min: 'tokens', staleness_min: 'staleness'};
const EQUAL = ['trained_at', 'group', 'env', 'outcome', 'state'];
const POINTS = 300;

// What the server would say to `url`; raises an Error where the file does not have it.
export function answer(url) {
  const [asked, given] = url.split('?'), query = Object.fromEntries(new URLSearchParams(given));
  const path = asked.split('/').slice(4).join('/');  // behind /api/runs/RUN/
  if (asked === '/api/runs') return {runs: recorded.runs, folder: '', left_out: 0};
  if (recorded.refused[path]) throw new Error(recorded.refused[path]);
  if (path === 'trajectories') return list(query);
  const found = recorded.answers[path];
  if (found === undefined) throw new Error('This is not in the file: it has a sample of the trajectories and batches. “slipstream dash” shows all.');
  if (path === 'timeline') return timeline(found, query);
  if (path.endsWith('/tokens')) return tokens(found, +query.start, +query.end);
  return found;
}

// The version nearest to this one of which the file has trajectories.
export function sampledVersion(version) {
  const versions = recorded.trajectories.rows.map(row => row.trained_at).filter(one => one != null);
  return versions.reduce((best, one) => best == null || Math.abs(one - version) < Math.abs(best - version) ? one : best, null) ?? version;
}

function list(query) {
  const known = (row, name) => row[name] ?? -1;
  const rows = recorded.trajectories.rows.filter(row =>
    Object.entries(AT_LEAST).every(([asked, name]) => query[asked] == null || known(row, name) >= +query[asked]) &&
    (query.reward_max == null || row.reward <= +query.reward_max) &&
    EQUAL.every(name => query[name] == null || String(row[name]) === query[name]) &&
    row.task.toLowerCase().includes((query.task || '').toLowerCase()));
  const key = !query.sort || query.sort === 'newest' ? 'rowid' : query.sort, sign = query.ascending ? 1 : -1;
  rows.sort((a, b) => sign * (known(a, key) - known(b, key)) || b.rowid - a.rowid);
  return {...recorded.trajectories, total: rows.length, rows};
}

function tokens(whole, start, end) {
  if (start >= whole.end) throw new Error(`The file has the first ${whole.end} tokens of it.`);
  const cut = value => Array.isArray(value) ? value.slice(start, end) : value && typeof value === 'object' ?
    Object.fromEntries(Object.entries(value).map(([name, part]) => [name, cut(part)])) : value;
  return {...cut(whole), start, end: Math.min(end, whole.end)};
}

// A window of the whole run, which `whole` is; gauges have its points.
function timeline(whole, query) {
  if (!whole.bounds || query.t0 == null) return whole;
  const t0 = +query.t0, t1 = +query.t1, [first, last] = whole.bounds, part = (last - first) / whole.points;
  const at = Array.from({length: POINTS}, (_, i) => Math.floor((t0 + (i + .5) / POINTS * (t1 - t0) - first) / part));
  const window = columns => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, at.map(i => values[i] ?? null)]));
  const touching = spans => spans.filter(one => one.t1 >= t0 && one.t0 <= t1);
  return {bounds: whole.bounds, t0, t1, points: POINTS, phases: touching(whole.phases), pushes: touching(whole.pushes),
    series: Object.fromEntries(Object.entries(whole.series).map(([role, columns]) => [role, window(columns)]))};
}
