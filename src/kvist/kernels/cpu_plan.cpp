// Cuts the work of one step into units that threads can share, once for all layers of a group.

#include "cpu.h"

#include <algorithm>

namespace kvist {
namespace {

// Queries of one unit: enough that keys and values read once serve many, few enough that their results stay in the
// nearest cache.
constexpr int kRows = 192;
constexpr std::int64_t kResultElements = 192 * 64;
// A part of a sequence's keys must be worth the merging of its result.
constexpr std::int64_t kLeastKeys = 512;
// Tasks that long contexts are cut into, if they are long enough: for many threads, however few there are, so that
// answers do not depend on them.
constexpr std::int64_t kTasks = 32;
constexpr std::int64_t kKeyStep = 128;
// Where keys are told what they draw, a unit's weights are kept until its sums are known: so many bytes of them, and so
// many units of a sequence at least.
constexpr std::int64_t kKeptBytes = 3 << 19;
constexpr int kLeastUnits = 4;
constexpr int kLeastRows = 16;

struct Piece {
    int first_row, end_row;
    std::int64_t first_key, end_key;
    const std::int64_t* offsets;
    int segment;
    int drawn = -1;
};

// Sixteen queries are computed at once, so that is what a key costs.
std::int64_t cost(const Piece& piece, int repeats) {
    const std::int64_t queries = (static_cast<std::int64_t>(piece.end_row - piece.first_row) * repeats + 15) / 16;
    return queries * (piece.end_key - piece.first_key);
}

// Rows of a unit whose keys are told what they draw.
int rows_of_drawn(int most, std::int64_t rows, std::int64_t keys, int repeats) {
    const std::int64_t queries = std::max<std::int64_t>(16, kKeptBytes / (2 * keys));
    const std::int64_t fair = std::max<std::int64_t>(kLeastRows, (rows + kLeastUnits - 1) / kLeastUnits);
    return static_cast<int>(std::clamp<std::int64_t>(std::min(queries / repeats, fair), 1, most));
}

// Heads whose queries fill the lanes of one vector together.
int heads_together(int rows, const Geometry& shape) {
    return std::clamp(16 / std::max(1, rows * shape.repeats), 1, shape.kv_heads);
}

// `seen` ascends from row to row of a sequence.
void cut_rows(std::vector<Piece>& pieces, Piece whole, int rows, const std::vector<std::int64_t>& seen,
              std::int64_t window) {
    for (int row = whole.first_row; row < whole.end_row; row += rows) {
        Piece piece = whole;
        piece.first_row = row;
        piece.end_row = std::min(row + rows, whole.end_row);
        piece.end_key = std::min(whole.end_key, seen[piece.end_row - 1] + 1);
        if (window > 0) piece.first_key = std::max(whole.first_key, seen[row] - window + 1);
        if (piece.first_key < piece.end_key) pieces.push_back(piece);
    }
}

// What all rows of several sequences see.
void cut_rows(std::vector<Piece>& pieces, Piece whole, int rows) {
    for (int row = whole.first_row; row < whole.end_row; row += rows) {
        pieces.push_back(whole);
        pieces.back().first_row = row;
        pieces.back().end_row = std::min(row + rows, whole.end_row);
    }
}

void cut_segment(std::vector<Piece>& pieces, Plan& plan, int number, const Tables& tables, const std::vector<Run>& runs,
                 int rows, const std::vector<int>& drawn) {
    Segment& segment = plan.segments[number];
    const int size = segment.geometry.block_tokens;
    segment.offsets.resize(tables.blocks.size());
    for (std::size_t i = 0; i < tables.blocks.size(); ++i)
        segment.offsets[i] = tables.blocks[i] < 0 ? -1 : segment.geometry.offset(tables.blocks[i]);
    std::vector<int> first_row{0};
    for (const std::int64_t count : tables.count) first_row.push_back(first_row.back() + static_cast<int>(count));
    if (number == plan.open) {
        for (std::size_t span = 0; span < tables.count.size(); ++span) {
            const std::int64_t* offsets = segment.offsets.data() + tables.begin[span];
            for (int row = first_row[span]; row < first_row[span + 1]; ++row) {
                plan.append.push_back(offsets[segment.seen[row] / size]);
                plan.append_slots.push_back(static_cast<int>(segment.seen[row] % size));
            }
        }
    }
    std::vector<std::int64_t> shared(tables.count.size(), 0);
    for (const Run& run : runs) {
        Piece whole{first_row[run.first_span], first_row[run.end_span], run.first_block * size, run.end_block * size,
                    segment.offsets.data() + tables.begin[run.first_span], number};
        cut_rows(pieces, whole, rows);
        for (std::int64_t span = run.first_span; span < run.end_span; ++span) shared[span] = run.end_block * size;
    }
    for (std::size_t span = 0; span < tables.count.size(); ++span) {
        std::int64_t begin = shared[span];
        if (plan.window > 0) begin = std::max(begin, segment.seen[first_row[span]] - plan.window + 1);
        Piece whole{first_row[span], first_row[span + 1], begin, segment.seen[first_row[span + 1] - 1] + 1,
                    segment.offsets.data() + tables.begin[span], number, number == 0 ? drawn[span] : -1};
        const int each = whole.drawn < 0 ? rows : rows_of_drawn(rows, tables.count[span], whole.end_key, plan.shape().repeats);
        cut_rows(pieces, whole, each, segment.seen, plan.window);
    }
}

}  // namespace

void make_plan(Plan& plan, const std::vector<Tables>& tables, const std::vector<Run>& runs,
               const std::vector<int>& drawn) {
    const Geometry& shape = plan.shape();
    const std::size_t rows = plan.segments.front().seen.size();
    const int rows_a_unit =
        std::max(1, static_cast<int>(std::min<std::int64_t>(kRows, kResultElements / shape.dim)) / shape.repeats);
    std::vector<Piece> pieces;
    for (std::size_t number = 0; number < tables.size(); ++number)
        cut_segment(pieces, plan, static_cast<int>(number), tables[number], number == 0 ? runs : std::vector<Run>{},
                    rows_a_unit, drawn);
    // Long pieces are cut along their keys, so that threads finish together.
    std::int64_t total = 0;
    for (const Piece& piece : pieces) total += cost(piece, shape.repeats);
    const std::int64_t target = std::max<std::int64_t>(1, total * shape.kv_heads / kTasks);
    std::vector<Piece> parts;
    for (const Piece& piece : pieces) {
        const std::int64_t keys = piece.end_key - piece.first_key;
        const std::int64_t task = cost(piece, shape.repeats) * heads_together(piece.end_row - piece.first_row, shape);
        const std::int64_t most = std::max<std::int64_t>(1, keys / kLeastKeys);
        // What a key draws is known with all that its query sees.
        const std::int64_t count = piece.drawn < 0 ? std::clamp<std::int64_t>((task + target - 1) / target, 1, most) : 1;
        const std::int64_t step = ((keys + count - 1) / count + kKeyStep - 1) / kKeyStep * kKeyStep;
        for (std::int64_t key = piece.first_key; key < piece.end_key;) {
            Piece part = piece;
            part.first_key = key;
            // Every part but the first begins on a whole step, wherever the piece begins.
            key = std::min(piece.end_key, (key + step) / kKeyStep * kKeyStep);
            part.end_key = key;
            parts.push_back(part);
        }
    }
    std::vector<int> results(rows, 0);
    for (const Piece& part : parts)
        for (int row = part.first_row; row < part.end_row; ++row) ++results[row];
    const std::int64_t result_size = static_cast<std::int64_t>(shape.repeats) * shape.kv_heads * (shape.dim + 2);
    std::int64_t size_of_partials = 0, size_of_weighed = 0;
    for (const Piece& part : parts) {
        Unit unit{part.first_row, part.end_row, part.first_key, part.end_key, part.offsets, -1, part.segment, part.drawn, 0};
        if (std::any_of(results.begin() + part.first_row, results.begin() + part.end_row,
                        [](int count) { return count > 1; })) {
            unit.partial = size_of_partials;
            size_of_partials += (part.end_row - part.first_row) * result_size;
        }
        if (unit.drawn >= 0) {
            unit.weighed = size_of_weighed;
            size_of_weighed += shape.kv_heads * weighed_keys(unit);
        }
        plan.units.push_back(unit);
    }
    plan.weighed.resize(size_of_weighed);
    plan.partials.resize(size_of_partials);
    std::vector<std::vector<Partial>> of_row(rows);
    for (const Unit& unit : plan.units)
        if (unit.partial >= 0)
            for (int row = unit.first_row; row < unit.end_row; ++row)
                of_row[row].push_back({unit.partial, unit.first_row});
    plan.partial_begin.push_back(0);
    for (std::size_t row = 0; row < of_row.size(); ++row) {
        if (of_row[row].empty()) continue;
        plan.merged_rows.push_back(static_cast<int>(row));
        plan.partial.insert(plan.partial.end(), of_row[row].begin(), of_row[row].end());
        plan.partial_begin.push_back(static_cast<std::int64_t>(plan.partial.size()));
    }
    // The dearest first, so that none is left for the end.
    std::stable_sort(plan.units.begin(), plan.units.end(), [](const Unit& one, const Unit& other) {
        return (one.end_row - one.first_row) * (one.end_key - one.first_key) >
               (other.end_row - other.first_row) * (other.end_key - other.first_key);
    });
    for (std::size_t unit = 0; unit < plan.units.size(); ++unit) {
        int heads = heads_together(plan.units[unit].end_row - plan.units[unit].first_row, shape);
        // A lone task is cut in two: of one short sequence.
        if (plan.units.size() == 1 && heads == shape.kv_heads) heads = (heads + 1) / 2;
        for (int head = 0; head < shape.kv_heads; head += heads)
            plan.tasks.push_back({static_cast<int>(unit), head, std::min(heads, shape.kv_heads - head)});
    }
}

}  // namespace kvist
