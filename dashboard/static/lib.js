// What all views share: requests, live changes, the address, and numbers as text. Text of a run is only ever a text node.
import {html, useState, useEffect, useRef, useMemo, useCallback} from '/static/vendor/preact.js';
import {recorded, answer} from '/static/recorded.js';

export {html, useState, useEffect, useRef, useMemo, useCallback, recorded};
export const DASH = '–';

export async function get(url) {
  if (recorded) return answer(url);
  const response = await fetch(url);
  if (response.status === 403) throw new Error('the server wants its token: open the address that it printed');
  const body = await response.json();
  if (!response.ok) throw new Error(body.error || `${url}: ${response.status}`);
  return body;
}

export const api = (run, path, query = {}) => {
  const given = Object.entries(query).filter(([, value]) => value !== '' && value != null);
  const text = new URLSearchParams(given).toString();
  return `/api/runs/${encodeURIComponent(run)}/${path}${text ? '?' + text : ''}`;
};

// Changes of runs, from one stream for the whole page: run -> a number that grows. A page that is not seen does not listen, and so asks
// for nothing; when it is seen again it hears at once what has changed.
const listeners = new Set();
export const live = {changes: {}, connected: null};
export function listen() {
  if (recorded) return;
  let stream = null;
  const tell = () => listeners.forEach(listener => listener());
  const look = () => {
    if (document.hidden) { stream?.close(); stream = null; return; }
    if (stream) return;
    stream = new EventSource('/api/events');
    stream.onmessage = event => { live.changes = JSON.parse(event.data); live.connected = true; tell(); };
    stream.onerror = () => { live.connected = false; tell(); };
  };
  document.addEventListener('visibilitychange', look);
  look();
}
export function useLive() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again(n => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return live;
}

// {data, error, loading}: what `url` answers, asked again when `change` differs. The last answer stays until the next one is there.
export function useData(url, change = 0) {
  const [state, set] = useState({});
  useEffect(() => {
    if (!url) return;
    let wanted = true;
    get(url).then(data => wanted && set({url, data}), error => wanted && set(old => ({...old, url, error: error.message})));
    return () => { wanted = false; };
  }, [url, change]);
  return {...state, loading: state.url !== url};
}
export const useRun = (run, path, query) => useData(api(run, path, query), useLive().changes[run]);

// The address: #/RUN/VIEW/ID?filters
export function parse() {
  const [path, query = ''] = location.hash.replace(/^#\/?/, '').split('?');
  const [run = '', view = '', ...id] = path.split('/').map(decodeURIComponent);
  return {run, view, id: id.join('/'), query: Object.fromEntries(new URLSearchParams(query))};
}
export function link(run, view = 'now', id = '', query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== '' && value != null);
  const text = new URLSearchParams(given).toString();
  return '#/' + [run, view, id].filter(part => part !== '').map(encodeURIComponent).join('/') + (text ? '?' + text : '');
}
export const go = (...to) => { location.hash = link(...to); };

export function count(n) {
  if (n == null || !isFinite(n)) return DASH;
  for (const [unit, size] of [['G', 1e9], ['M', 1e6], ['k', 1e3]])
    if (Math.abs(n) >= 0.9995 * size) return +(n / size).toPrecision(3) + unit;
  return n && Math.abs(n) < 1e-3 ? n.toExponential(1) : String(+n.toPrecision(3));
}
export const share = x => x == null ? DASH : x > 0 && x < 0.005 ? '<1 %' : `${Math.round(100 * x)} %`;
export const fixed = (x, digits = 3) => x == null ? DASH : x.toFixed(digits);
export function duration(s) {
  if (s == null) return DASH;
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 60) return `${+s.toPrecision(2)} s`;
  s = Math.round(s);
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, '0')} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor(s % 3600 / 60)).padStart(2, '0')} min`;
}
export const now = () => recorded ? recorded.time : Date.now() / 1000;
export const date = t => t == null ? DASH : new Date(1000 * t).toLocaleString([], {dateStyle: 'medium', timeStyle: 'short'});
export const ago = t => t == null ? DASH : recorded ? date(t) : duration(Math.max(0, now() - t)) + ' ago';
export const clock = t => t == null ? DASH : new Date(1000 * t).toLocaleTimeString();

// A color of the page's palette. It is looked up once: a look makes the browser compute the styles of what has changed.
const palette = new Map();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => palette.clear());
export function css(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim());
  return palette.get(name);
}
export const RUN_COLORS = ['blue', 'orange', 'green', 'red', 'violet', 'teal', 'muted'];
export const runColor = i => css(RUN_COLORS[i % RUN_COLORS.length]);
export const stalenessColor = s => css('s' + Math.max(0, Math.min(4, s)));
export const versionColor = v => `hsl(${v * 67 % 360} 62% 52%)`;
// Of a log-prob: the less likely a token was, the stronger.
export const surprise = logprob => Math.max(0, Math.min(1, -logprob / 3));

// Redraw when the browser turns dark or light.
export function useTheme() {
  const [dark, set] = useState(matchMedia('(prefers-color-scheme: dark)').matches);
  useEffect(() => {
    const query = matchMedia('(prefers-color-scheme: dark)');
    const listener = () => set(query.matches);
    query.addEventListener('change', listener);
    return () => query.removeEventListener('change', listener);
  }, []);
  return dark;
}
export const Problem = ({error}) => html`<div class="card bad">${error}</div>`;
export const Tile = ({name, value, note, wide}) =>
  html`<div class="tile ${wide ? 'wide' : ''}"><div class="name">${name}</div><div class="value">${value}</div>${note && html`<div class="note">${note}</div>`}</div>`;
export const Chip = ({name, children}) => html`<span class="chip"><b>${name}</b>${children}</span>`;

// A curve as small as a line of text.
export function Spark({values, width = 160, height = 30}) {
  const known = values.map((y, x) => [x, y]).filter(([, y]) => y != null);
  if (known.length < 2) return null;
  const ys = known.map(([, y]) => y), low = Math.min(...ys), high = Math.max(...ys);
  const at = ([x, y]) => `${(2 + x / (values.length - 1) * (width - 4)).toFixed(1)},${(height - 3 - (high > low ? (y - low) / (high - low) : .5) * (height - 6)).toFixed(1)}`;
  return html`<svg class="spark" width=${width} height=${height} viewBox="0 0 ${width} ${height}" aria-hidden="true">
    <polyline points=${known.map(at).join(' ')} fill="none" stroke="var(--green)" stroke-width="1.8" stroke-linejoin="round" /></svg>`;
}

// A canvas as wide as its place: `draw(context, width, height)` in CSS pixels.
export function Canvas({height, draw, ...given}) {
  const ref = useRef(), [width, setWidth] = useState(0), dark = useTheme();
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (!width) return;
    const canvas = ref.current, ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.height = height + 'px';
    const context = canvas.getContext('2d');
    context.scale(ratio, ratio);
    draw(context, width, height);
  }, [width, height, draw, dark]);
  return html`<canvas ref=${ref} ...${given}></canvas>`;
}
