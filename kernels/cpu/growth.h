// The growth of draft trees, and what drafts have turned out to be worth: stages/decoding/growth.py and
// stages/decoding/drafters/calibration.py, whose formulas these are, but for the last bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

namespace eagle {

// A calibration's numbers, in the order of calibration.py: of each depth a curve, then of each depth, kind of parent and rank
// a mean and its weight.
struct Calibration {
  static constexpr int64_t DEPTHS = 6, KINDS = 4, RANKS = 4, CURVE = 5, SIZE = DEPTHS * (CURVE + KINDS * RANKS * 2);
  static constexpr double FADING = 0.999, TRUST = 20.0;
  double* numbers;

  static double logit(double p) {
    if (!(1e-4 < p && p < 1 - 1e-4)) return p > 0.5 ? 9.21024 : -9.21024;
    return std::log(p / (1 - p));
  }
  static int64_t level(int64_t depth) { return std::min(depth, DEPTHS) - 1; }
  static int64_t kind(double chance) { return (chance >= 0.35) + (chance >= 0.6) + (chance >= 0.85); }

  double* curve(int64_t depth) const { return numbers + level(depth) * CURVE; }
  double* mean(int64_t depth, double parent, int64_t rank) const {
    return numbers + DEPTHS * CURVE + ((level(depth) * KINDS + kind(parent)) * RANKS + rank) * 2;
  }

  static double at(const double* curve, double x) { return 1.0 / (1.0 + std::exp(-curve[0] - curve[1] * x)); }
  double probability(int64_t depth, double stated) const { return at(curve(depth), logit(stated)); }

  void learn(int64_t depth, double stated, double parent, int64_t rank, bool hit) const {
    double *c = curve(depth), x = logit(stated), p = at(c, x), weight = std::max(p * (1 - p), 0.01);
    double fade = c[2] > TRUST / 4 ? FADING : 1.0;
    c[2] = fade * c[2] + weight;
    c[3] = fade * c[3] + weight * x;
    c[4] = fade * c[4] + weight * x * x;
    double determinant = std::max(c[2] * c[4] - c[3] * c[3], 1e-6), error = double(hit) - p;
    c[0] += error * (c[4] - c[3] * x) / determinant;
    c[1] += error * (c[2] * x - c[3]) / determinant;
    c[0] = std::max(-5.0, std::min(5.0, c[0]));
    c[1] = std::max(0.1, std::min(3.0, c[1]));
    if (rank >= RANKS) return;
    double* m = mean(depth, parent, rank);
    m[1] = std::min(m[1] + 1.0, 200.0);
    m[0] += (double(hit) - m[0]) / m[1];
  }
};

enum TreeKind { STATIC, DYNAMIC, BEST, PRICED };

struct TreePlan {
  int64_t kind, depth, width, nodes;
  double min_prob, expand_prob;
};

// A static tree: of each node its parent among them, -1 the root, and its rank there.
struct StaticTree {
  std::vector<std::pair<int64_t, int64_t>> nodes;

  int64_t child(int64_t node, int64_t rank) const {
    for (size_t i = 0; i < nodes.size(); ++i)
      if (nodes[i] == std::pair(node, rank)) return i;
    return OUTSIDE;
  }
  bool has_child(int64_t node) const {
    return std::any_of(nodes.begin(), nodes.end(), [&](const auto& other) { return other.first == node; });
  }
  static constexpr int64_t ROOT = -1, OUTSIDE = -2;
};

struct Prices {
  std::vector<double> nodes, rows;

  double marginal(int64_t count) const {
    int64_t last = int64_t(nodes.size()) - 1;
    double here = nodes[std::min(count, last)], least = std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < 4 && count + 1 + j <= last; ++j) least = std::min(least, (nodes[count + 1 + j] - here) / (j + 1));
    return least;
  }
};

// node: its place in a static tree. row: of the pass that ranked its children, -1 where none has.
struct Candidate {
  int64_t token, parent, depth, rank, node, row = -1;
  double reach, stated, chance;
  uint64_t word = 0;
};

struct Growth {
  static constexpr int64_t MOST_EXPANDED = 64;
  TreePlan plan;
  Calibration calibration;
  const StaticTree* paths;
  std::vector<Candidate> all;
  int64_t expanded = 0, root_row = -1;

  int64_t capacity() const { return MOST_EXPANDED - expanded; }
  double reach(int64_t i) const { return i < 0 ? 1.0 : all[i].reach; }
  bool before(int64_t a, int64_t b) const { return std::pair(-all[a].reach, a) < std::pair(-all[b].reach, b); }

  void add_child(int64_t parent, int64_t rank, int64_t token, double log_prob) {
    bool below = parent >= 0;
    Candidate c{token, parent, below ? all[parent].depth + 1 : 1, rank, StaticTree::OUTSIDE};
    if (plan.kind == STATIC) c.node = paths->child(below ? all[parent].node : StaticTree::ROOT, rank);
    c.stated = std::exp(std::min(log_prob, 0.0));
    c.chance = plan.kind == PRICED ? calibration.probability(c.depth, c.stated) : c.stated;
    c.reach = reach(parent) * c.chance;
    all.push_back(c);
  }

  // Candidates that the last pass brought, where they may have children.
  std::vector<int64_t> last_level() const {
    std::vector<int64_t> found;
    if (all.empty() || all.back().depth >= plan.depth) return found;
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].depth == all.back().depth && all[i].row < 0) found.push_back(i);
    return found;
  }

  // The best candidates that are probable enough, ties by index.
  std::vector<int64_t> best() const {
    std::vector<int64_t> found;
    for (size_t i = 0; i < all.size(); ++i)
      if (plan.kind == STATIC ? all[i].node >= 0 : all[i].reach >= plan.min_prob) found.push_back(i);
    if (plan.kind == STATIC) return found;
    std::sort(found.begin(), found.end(), [&](int64_t a, int64_t b) { return before(a, b); });
    if (int64_t(found.size()) > plan.nodes) found.resize(plan.nodes);
    return found;
  }

  // Of trees without prices.
  std::vector<int64_t> frontier() const {
    std::vector<int64_t> open;
    if (plan.kind == BEST) {
      for (size_t i = 0; i < all.size(); ++i)
        if (all[i].depth < plan.depth && all[i].row < 0) open.push_back(i);
    } else {
      open = last_level();
    }
    auto keep = [&](auto wanted) {
      open.erase(std::remove_if(open.begin(), open.end(), [&](int64_t i) { return !wanted(i); }), open.end());
    };
    int64_t most = capacity();
    if (plan.kind == STATIC) {
      keep([&](int64_t i) { return all[i].node >= 0 && paths->has_child(all[i].node); });
    } else {
      std::vector<int64_t> chosen = best();
      keep([&](int64_t i) { return std::find(chosen.begin(), chosen.end(), i) != chosen.end(); });
      std::sort(open.begin(), open.end(), [&](int64_t a, int64_t b) { return before(a, b); });
      most = std::min(most, plan.width);
      if (open.empty() || all[open[0]].reach < plan.expand_prob) return {};
    }
    if (int64_t(open.size()) > most) open.resize(most);
    return open;
  }

  double gain(int64_t candidate, double node_price, double level_price) const {
    double chance = all[candidate].reach, total = 0, last = all[candidate].chance;
    for (int64_t depth = all[candidate].depth + 1; depth <= plan.depth; ++depth) {
      double net = total != 0 ? -level_price : 0.0;
      for (int64_t rank = 0; rank < std::min(plan.width, Calibration::RANKS); ++rank) {
        double worth = chance * *calibration.mean(depth, last, rank) - node_price;
        if (worth > 0) net += worth;
      }
      if (net <= 0) break;
      total += net;
      last = *calibration.mean(depth, last, 0);
      chance *= last;
    }
    return total;
  }
};

using Chosen = std::vector<std::vector<int64_t>>;  // candidates, of each tree

// Takes candidates in the order of their scores, and keeps as many as gain most over their price; `price` has one for every
// count, `room` says how many each tree has place for.
template <typename Price>
Chosen most_gain(std::vector<std::tuple<double, int64_t, int64_t>>& scored, std::vector<int64_t> room, int64_t most,
                 bool positive, const Price& price) {
  std::sort(scored.begin(), scored.end());
  std::vector<std::pair<int64_t, int64_t>> taken;
  double total = 0, best = 0;
  size_t best_count = 0;
  for (auto [negative, b, i] : scored) {
    if (int64_t(taken.size()) + 1 > most || (positive && negative >= 0)) break;
    if (room[b] == 0) continue;
    room[b] -= 1;
    taken.push_back({b, i});
    total -= negative;
    double gain = total - price(taken.size());
    if (gain > best) best = gain, best_count = taken.size();
  }
  Chosen chosen(room.size());
  for (size_t k = 0; k < best_count; ++k) chosen[taken[k].first].push_back(taken[k].second);
  return chosen;
}

inline std::vector<int64_t> priced_ones(const std::vector<Growth>& growths) {
  std::vector<int64_t> found;
  for (size_t b = 0; b < growths.size(); ++b)
    if (growths[b].plan.kind == PRICED) found.push_back(b);
  return found;
}

// The candidates of each priced tree whose chances, summed, exceed their price by most.
inline Chosen cut(const std::vector<Growth>& growths, const Prices& prices) {
  std::vector<std::tuple<double, int64_t, int64_t>> scored;
  std::vector<int64_t> room(growths.size());
  for (int64_t b : priced_ones(growths)) {
    room[b] = growths[b].plan.nodes;
    for (size_t i = 0; i < growths[b].all.size(); ++i) scored.push_back({-growths[b].all[i].reach, b, i});
  }
  return most_gain(scored, room, int64_t(prices.nodes.size()) - 1, false, [&](size_t count) { return prices.nodes[count]; });
}

// What to expand next in each tree; all empty when no tree is worth another pass.
inline Chosen frontiers(const std::vector<Growth>& growths, const Prices& prices) {
  Chosen chosen(growths.size());
  std::vector<int64_t> priced = priced_ones(growths);
  if (!priced.empty()) {
    int64_t nodes = 0, sequences = priced.size();
    for (const auto& kept : cut(growths, prices)) nodes += kept.size();
    double node_price = prices.marginal(nodes);
    double level_price = prices.rows[std::min<int64_t>(sequences, int64_t(prices.rows.size()) - 1)] / sequences;
    std::vector<std::tuple<double, int64_t, int64_t>> scored;
    std::vector<int64_t> room(growths.size());
    for (int64_t b : priced) {
      room[b] = std::min(growths[b].plan.width, growths[b].capacity());
      for (int64_t i : growths[b].last_level()) scored.push_back({-growths[b].gain(i, node_price, level_price), b, i});
    }
    chosen = most_gain(scored, room, int64_t(prices.rows.size()) - 1, true, [&](size_t count) { return prices.rows[count]; });
  }
  for (size_t b = 0; b < growths.size(); ++b)
    if (growths[b].plan.kind != PRICED) chosen[b] = growths[b].frontier();
  return chosen;
}

// The candidates to verify, of each tree in ascending order.
inline Chosen final_trees(const std::vector<Growth>& growths, const Prices& prices) {
  Chosen chosen = cut(growths, prices);
  for (size_t b = 0; b < growths.size(); ++b) {
    if (growths[b].plan.kind != PRICED) chosen[b] = growths[b].best();
    std::sort(chosen[b].begin(), chosen[b].end());
  }
  return chosen;
}

}  // namespace eagle
