// A whole drafting cycle with an EAGLE head, of many sequences at once: what stages/decoding/drafters/growing.py and eagle.py do
// step by step. Between the passes of a head stands little work on many small things, which finds the caches emptied by the
// pass before: in Python, with a call for every step, it takes as long as the passes themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/custom_class.h>

#include <tuple>
#include <vector>

#include "compact.h"
#include "growth.h"
#include "layers.h"
#include "linear.h"
#include "rank.h"

namespace eagle {

// An EAGLE-3 or EAGLE-1 head; see stages/heads.
struct Head : torch::CustomClassHolder {
  enum Switch { RESIDUAL_NORMED = 1, FEEDBACK_NORMED = 2 };
  c10::intrusive_ptr<Layers> layers;
  Tensor table;                      // [V, h], embeddings
  Tensor whole_gain;                 // of the norm of the target's state before fc; empty where there is none
  std::vector<Tensor> part_gains;    // of the norms of its equal parts; none, or one of each
  Tensor fc;                         // packed, as `output` is, in 8 bits or not. EAGLE-3: of the target's states; EAGLE-1: of embedding and feature
  std::optional<Tensor> fc_bias;
  Tensor embed_gain, feature_gain;   // EAGLE-3's norms before its first layer; empty for EAGLE-1
  Tensor gain;                       // of the norm before the output; empty where there is none
  Tensor output;                     // packed
  Tensor ids;                        // int64 [Vd], target ids of the draft vocabulary
  int64_t switches;
  double scale;                      // of what is scored

  Head(c10::intrusive_ptr<Layers> layers, Tensor table, Tensor whole_gain, std::vector<Tensor> part_gains, Tensor fc,
       std::optional<Tensor> fc_bias, Tensor embed_gain, Tensor feature_gain, Tensor gain, Tensor output, Tensor ids,
       int64_t switches, double scale)
      : layers(std::move(layers)), table(std::move(table)), whole_gain(std::move(whole_gain)),
        part_gains(std::move(part_gains)), fc(std::move(fc)), fc_bias(std::move(fc_bias)), embed_gain(std::move(embed_gain)), feature_gain(std::move(feature_gain)),
        gain(std::move(gain)), output(std::move(output)), ids(ids.contiguous()), switches(switches), scale(scale) {}

  int64_t width() const { return table.size(1); }
  bool is_first_kind() const { return !embed_gain.numel(); }
  double eps() const { return layers->norm.eps; }
  int64_t norms() const { return layers->norm.kind; }

  // What the target gives [M, w] to features [M, h].
  Tensor fuse(const Tensor& states) const {
    Tensor x = states.to(table.scalar_type());
    if (is_first_kind()) return x;
    if (whole_gain.numel()) x = norm(x, whole_gain, eps(), norms());
    std::vector<Tensor> parts;
    for (size_t i = 0; i < part_gains.size(); ++i) {
      int64_t part = x.size(1) / int64_t(part_gains.size());
      parts.push_back(norm(x.narrow(1, int64_t(i) * part, part), part_gains[i], eps(), norms()));
    }
    if (!parts.empty()) x = at::cat(parts, 1);
    return linear_of(x, fc, fc_bias, width());
  }

  // One pass over rows: the last layer's output [M, h].
  Tensor forward(const Tensor& tokens, const Tensor& feature, const Tensor& positions, const Tensor& places, const Tensor& cache,
                 const Tensor& cos, const Tensor& sin) const {
    Tensor none = at::empty({0}, feature.options());
    if (is_first_kind()) {
      Tensor hidden = linear_of(at::cat({table.index_select(0, tokens), feature}, 1), fc, fc_bias, width());
      return eagle::layers(layers, hidden, hidden, places, positions, cache, cos, sin, none, {});
    }
    Tensor entry = normed_pairs(table, tokens, feature, embed_gain, feature_gain, eps(), norms());
    Tensor residual = switches & RESIDUAL_NORMED ? entry.narrow(1, width(), width()) : feature;
    return eagle::layers(layers, residual, entry, places, positions, cache, cos, sin, none, {});
  }

  Tensor scored(const Tensor& hidden) const { return gain.numel() ? norm(hidden, gain, eps(), norms()) : hidden; }

  Tensor logits(const Tensor& hidden) const {
    Tensor x = scored(hidden);
    return linear_of(scale == 1 ? x : at::mul(x, scale), output, std::nullopt, ids.numel());
  }

  Tensor feedback(const Tensor& hidden) const { return switches & FEEDBACK_NORMED ? scored(hidden) : hidden; }
};

inline Tensor head_fuse(const c10::intrusive_ptr<Head>& head, const Tensor& states) { return head->fuse(states); }

inline Tensor head_pass(const c10::intrusive_ptr<Head>& head, const Tensor& tokens, const Tensor& feature, const Tensor& positions,
                        const Tensor& places, const Tensor& cache, const Tensor& cos, const Tensor& sin) {
  return head->forward(tokens, feature, positions, places, cache, cos, sin);
}

inline Tensor head_feedback(const c10::intrusive_ptr<Head>& head, const Tensor& hidden) { return head->feedback(hidden); }

inline Tensor head_logits(const c10::intrusive_ptr<Head>& head, const Tensor& hidden) { return head->logits(hidden); }

// One sequence in a cycle. length: its stable rows.
struct Drafting {
  int64_t slot, length, waiting, seed, sample;
  double temperature;
  std::vector<double> strengths;  // by depth

  double strength(int64_t depth) const { return temperature > 0 ? strengths[std::min<int64_t>(depth, strengths.size()) - 1] : 0.0; }
};

// The rows of a pass, in one piece of memory: tokens [M], positions [M], places [M, 4].
struct PassRows {
  Tensor whole;
  int64_t count, at = 0;

  explicit PassRows(int64_t rows) : whole(at::empty({6 * rows}, at::kLong)), count(rows) {}
  void add(int64_t token, int64_t position, int64_t slot, int64_t row, int64_t prefix, uint64_t word) {
    int64_t *to = whole.mutable_data_ptr<int64_t>(), *place = to + 2 * count + 4 * at;
    to[at] = token;
    to[count + at] = position;
    place[0] = slot, place[1] = row, place[2] = prefix, place[3] = int64_t(word);
    ++at;
  }
  Tensor tokens() const { return whole.narrow(0, 0, count); }
  Tensor positions() const { return whole.narrow(0, count, count); }
  Tensor places() const { return whole.narrow(0, 2 * count, 4 * count).view({count, 4}); }
};

constexpr int64_t SEQUENCE = 9;   // slot, stable rows, waiting tokens, seed, sample; kind, depth, width, nodes of the plan
constexpr int64_t SETTINGS = 3;   // temperature, min_prob, expand_prob
constexpr int64_t CANDIDATE = 7;  // see `draft`
constexpr float LEAST_SCORE = -1000.0f;  // a log-probability from here on down is no candidate's; nor is NaN

// Drafts a tree for each of B sequences.
//   states [W, w], waiting: the verified tokens that have not been run, and the target's states that go with them.
//   calibrations: float64, of each sequence. sequences int [B * 9], settings [B * 3]; strengths: of the noise, by depth, of each.
//   nodes, rows: the prices. paths: a static tree's nodes, parents and ranks. lag: a child stands so much further behind its
//   row. pool: tokens that are given noise.
// Returns
//   the number of passes and the rows of each; then of each sequence: candidates, nodes of its tree, and their tokens, parents
//       (among the nodes, 0 the root) and depths.
//   float64 [C, 7], the candidates: token, parent, depth, rank, row, chance as stated, and the node's own.
//   states [B, h] behind the last stable row.
//   pools: ids, log-probabilities and noise [rows, P], row b the b-th root's; none where nothing is drawn.
//   the rows of the target's forward over the trees, roots included: tokens, positions, places.
inline std::tuple<std::vector<int64_t>, Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>> draft(
    const c10::intrusive_ptr<Head>& head, const Tensor& cache, const Tensor& cos, const Tensor& sin, const Tensor& states,
    at::IntArrayRef waiting, at::TensorList calibrations, at::IntArrayRef sequences, at::ArrayRef<double> settings,
    at::ArrayRef<double> strengths, at::ArrayRef<double> nodes, at::ArrayRef<double> rows, at::IntArrayRef paths, int64_t lag,
    int64_t pool) {
  int64_t batch = calibrations.size();
  TORCH_CHECK(batch && !nodes.empty() && !rows.empty(), "nothing to draft, or no prices");
  int64_t depths = strengths.size() / batch;
  TORCH_CHECK(int64_t(sequences.size()) == batch * SEQUENCE && int64_t(settings.size()) == batch * SETTINGS, "numbers are missing");
  StaticTree fixed;
  for (size_t i = 0; i + 1 < paths.size(); i += 2) fixed.nodes.push_back({paths[i], paths[i + 1]});
  Prices prices{nodes.vec(), rows.vec()};
  std::vector<Drafting> drafts(batch);
  std::vector<Growth> growths(batch);
  bool hot = false;
  int64_t width = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* n = sequences.data() + b * SEQUENCE;
    const double* s = settings.data() + b * SETTINGS;
    TORCH_CHECK(calibrations[b].numel() == Calibration::SIZE && calibrations[b].scalar_type() == at::kDouble, "no calibration");
    drafts[b] = {n[0], n[1], n[2], n[3], n[4], s[0], {strengths.begin() + b * depths, strengths.begin() + (b + 1) * depths}};
    growths[b].plan = {n[5], n[6], n[7], n[8], s[1], s[2]};
    growths[b].calibration.numbers = const_cast<double*>(calibrations[b].const_data_ptr<double>());
    growths[b].paths = &fixed;
    TORCH_CHECK(n[2] > 0, "a sequence has no verified token to begin with");
    TORCH_CHECK(s[0] == 0 || depths, "a sequence has no strengths");
    hot = hot || s[0] > 0;
    width = std::max(width, n[7]);
  }
  width = std::min(width, head->ids.numel());
  pool = hot ? std::min(std::max(pool, width), head->ids.numel()) : 0;
  std::vector<int64_t> passes, ends;

  // Stable rows of what waits: the states behind them are those of the roots.
  PassRows verified(waiting.size());
  int64_t end = 0;
  for (Drafting& d : drafts) {
    for (int64_t i = 0; i < d.waiting; ++i) {
      int64_t row = d.length + i;
      verified.add(waiting[end + i], row, d.slot, row, row, 1);
    }
    end += d.waiting;
    d.length += d.waiting;
    ends.push_back(end - 1);
  }
  TORCH_CHECK(end == int64_t(waiting.size()) && end == states.size(0), "tokens or states are missing");
  passes.push_back(end);
  Tensor hidden = head->forward(verified.tokens(), head->fuse(states), verified.positions(), verified.places(), cache, cos, sin);
  Tensor roots = take_rows(hidden, ends), level = roots;

  std::vector<Tensor> pools[3];
  int64_t ranked = 0;  // rows whose children have been ranked
  std::vector<std::pair<int64_t, int64_t>> grown;  // of the pass at hand: sequence and candidate, -1 the root
  for (int64_t b = 0; b < batch; ++b) grown.push_back({b, -1});
  std::vector<Tensor> all;  // states of each pass
  while (!grown.empty()) {
    std::vector<double> temperature, strength;
    std::vector<int64_t> seed, sample, position;
    for (auto [b, candidate] : grown) {
      const Drafting& d = drafts[b];
      int64_t depth = candidate < 0 ? 1 : growths[b].all[candidate].depth + 1;
      temperature.push_back(d.temperature);
      strength.push_back(d.strength(depth));
      seed.push_back(d.seed);
      sample.push_back(d.sample);
      position.push_back(d.length + lag + depth - 1);
    }
    Tensor logits = head->logits(level);
    auto [tokens, scores, ids, log_probs, noise] = rank(logits, head->ids, temperature, strength, seed, sample, position, pool, width);
    if (hot) pools[0].push_back(ids), pools[1].push_back(log_probs), pools[2].push_back(noise);
    for (size_t r = 0; r < grown.size(); ++r) {
      auto [b, candidate] = grown[r];
      Growth& growth = growths[b];
      (candidate < 0 ? growth.root_row : growth.all[candidate].row) = ranked++;
      for (int64_t k = 0; k < std::min(width, growth.plan.width); ++k) {
        float score = scores.const_data_ptr<float>()[r * width + k];
        if (!(score > LEAST_SCORE)) break;
        growth.add_child(candidate, k, tokens.const_data_ptr<int64_t>()[r * width + k], score);
      }
    }
    all.push_back(level);
    Chosen chosen = frontiers(growths, prices);
    grown.clear();
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t candidate : chosen[b]) grown.push_back({b, candidate});
    if (grown.empty()) break;
    PassRows drafted(grown.size());
    std::vector<int64_t> parents;
    for (auto [b, candidate] : grown) {
      Growth& growth = growths[b];
      const Drafting& d = drafts[b];
      Candidate& c = growth.all[candidate];
      const Candidate* parent = c.parent < 0 ? nullptr : &growth.all[c.parent];
      c.word = (parent ? parent->word : 0) | uint64_t(1) << growth.expanded;
      drafted.add(c.token, d.length + c.depth - 1, d.slot, d.length + growth.expanded, d.length, c.word);
      growth.expanded += 1;
      parents.push_back(parent ? parent->row : growth.root_row);
    }
    passes.push_back(grown.size());
    Tensor before = all.size() == 1 ? all[0] : at::cat(all, 0);
    level = head->forward(drafted.tokens(), head->feedback(take_rows(before, parents)), drafted.positions(), drafted.places(),
                          cache, cos, sin);
  }

  Chosen trees = final_trees(growths, prices);
  std::vector<int64_t> told{int64_t(passes.size())};
  told.insert(told.end(), passes.begin(), passes.end());
  int64_t count = 0, all_nodes = batch;
  for (const Growth& growth : growths) count += growth.all.size();
  for (const auto& tree : trees) all_nodes += tree.size();
  PassRows next(all_nodes);
  Tensor candidates = at::empty({count, CANDIDATE}, at::kDouble);
  double* c = candidates.mutable_data_ptr<double>();
  for (int64_t b = 0; b < batch; ++b) {
    const auto& of = growths[b].all;
    const auto& tree = trees[b];
    for (const Candidate& one : of) {
      c[0] = one.token, c[1] = one.parent, c[2] = one.depth, c[3] = one.rank, c[4] = one.row;
      c[5] = one.stated, c[6] = one.chance;
      c += CANDIDATE;
    }
    told.push_back(of.size());
    told.push_back(tree.size());
    const Drafting& d = drafts[b];
    std::vector<int64_t> parents;
    std::vector<uint64_t> words{1};
    next.add(waiting[ends[b]], d.length, d.slot, d.length, d.length, 1);
    for (int64_t i : tree) {
      int64_t parent = of[i].parent < 0 ? 0 : std::lower_bound(tree.begin(), tree.end(), of[i].parent) - tree.begin() + 1;
      int64_t node = words.size();
      words.push_back(words[parent] | uint64_t(1) << node);
      next.add(of[i].token, d.length + of[i].depth, d.slot, d.length + node, d.length, words.back());
      parents.push_back(parent);
      told.push_back(of[i].token);
    }
    told.insert(told.end(), parents.begin(), parents.end());
    for (int64_t i : tree) told.push_back(of[i].depth);
  }
  std::vector<Tensor> joined;
  if (hot)
    for (const auto& parts : pools) joined.push_back(parts.size() == 1 ? parts[0] : at::cat(parts, 0));
  return {told, candidates, roots, joined, {next.tokens(), next.positions(), next.places()}};
}

// Of one level: the strength of the noise in use, then the log-likelihoods of past draws, by strength and factor; see strength.py.
inline void learn_strength(double* level, const Tensor& log_probs, const Tensor& noise, int64_t place, at::ArrayRef<double> grid,
                           at::ArrayRef<double> factors, at::ArrayRef<double> prior, double fading) {
  Tensor found = likelihoods(log_probs, noise, place, grid, factors);
  const double* now = found.const_data_ptr<double>();
  double best = -std::numeric_limits<double>::infinity(), *past = level + 1;
  for (size_t s = 0; s < grid.size(); ++s) {
    double most = -std::numeric_limits<double>::infinity();
    for (size_t a = 0; a < factors.size(); ++a, ++past, ++now) {
      *past = fading * *past + *now;
      most = std::max(most, *past);
    }
    if (most + prior[s] > best) best = most + prior[s], level[0] = grid[s];
  }
}

// Learns of a tree's candidates, rows `begin` to `end` of what `draft` returned, the output having gone on with `truth`: of all
// below a node that it passed how far they could be believed, and at a temperature, from the pools, how far the noise counted.
//   strengths: float64 [levels, 1 + S * A], where something is drawn. grid, factors, prior, fading: see strength.py.
inline void learn(const Tensor& calibration, const std::optional<Tensor>& strengths, const Tensor& candidates,
                  at::TensorList pools, int64_t begin, int64_t end, int64_t root_row, at::IntArrayRef truth, at::ArrayRef<double> grid, at::ArrayRef<double> factors, at::ArrayRef<double> prior,
                  double fading) {
  TORCH_CHECK(calibration.numel() == Calibration::SIZE && 0 <= begin && begin <= end && end <= candidates.size(0),
              "no such calibration or candidates");
  TORCH_CHECK(!strengths || (strengths->size(1) == int64_t(1 + grid.size() * factors.size()) && pools.size() == 3),
              "no such strengths, or no pools");
  Calibration learned{calibration.mutable_data_ptr<double>()};
  const double* c = candidates.const_data_ptr<double>() + begin * CANDIDATE;
  int64_t node = -1, depth = 0, levels = strengths ? strengths->size(0) : 0;
  for (int64_t token : truth) {
    int64_t row = node < 0 ? root_row : int64_t(c[node * CANDIDATE + 4]), level = std::min(depth, levels - 1);
    if (levels && row >= 0) {
      const Tensor& ids = pools[0];
      TORCH_CHECK(row < ids.size(0), "no pool ", row, " of ", ids.size(0));
      const int64_t *pool = ids.const_data_ptr<int64_t>() + row * ids.size(1), *last = pool + ids.size(1);
      const int64_t* at = std::find(pool, last, token);
      if (at != last)
        learn_strength(strengths->mutable_data_ptr<double>() + level * strengths->size(1), pools[1].select(0, row),
                       pools[2].select(0, row), at - pool, grid, factors, prior, fading);
    }
    int64_t next = -1;
    for (int64_t i = 0; i < end - begin; ++i) {
      const double* one = c + i * CANDIDATE;
      if (one[1] != node) continue;
      bool hit = one[0] == token;
      if (hit && next < 0) next = i;
      learned.learn(int64_t(one[2]), one[5], node < 0 ? 1.0 : c[node * CANDIDATE + 6], int64_t(one[3]), hit);
    }
    if (next < 0) break;
    node = next;
    ++depth;
  }
}

}  // namespace eagle
