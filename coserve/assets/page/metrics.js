// Prometheus's text format, and quantiles of its histograms.

/** Samples by metric: `[{labels, value}, ...]`. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((one) => [one[1], one[2]]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

export const total = (metrics, name) => (metrics.get(name) ?? []).reduce((sum, one) => sum + one.value, 0);

/** Cumulative counts `[[bound, count], ...]` of a histogram, less those of `before`. */
export function buckets(metrics, name, before = null) {
  const counts = (from) => (from?.get(`${name}_bucket`) ?? []).map((one) => [one.labels.le === "+Inf" ? Infinity : Number(one.labels.le), one.value]);
  const old = new Map(counts(before));
  const found = counts(metrics).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  return found.some(([, count]) => count < 0) ? counts(metrics) : found; // the daemon was started again
}

/** As `histogram_quantile`: linear within a bucket. null without observations. */
export function quantile(q, counts) {
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return null;
  const at = counts.findIndex(([, count]) => count >= q * all);
  const [low, below] = at ? counts[at - 1] : [0, 0];
  const [high, upTo] = counts[at];
  return high === Infinity ? low : low + ((high - low) * (q * all - below)) / (upTo - below || 1);
}

/** Share of observations up to `bound`, linear within a bucket. */
export function shareWithin(bound, counts) {
  const all = counts.at(-1)?.[1] ?? 0;
  const at = counts.findIndex(([high]) => high >= bound);
  if (!all || at < 0) return all ? 1 : null;
  const [low, below] = at ? counts[at - 1] : [0, 0];
  const [high, upTo] = counts[at];
  return (high === Infinity ? below : below + ((upTo - below) * (bound - low)) / (high - low)) / all;
}
