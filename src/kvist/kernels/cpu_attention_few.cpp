// Attention of one token's few queries of a KV head, as a decode has them, on the matrix unit (AMX).
//
// With few queries what is read decides, so that nothing that is read is transposed or made wider:
//
//     scores   S^T [tokens, columns] = K [tokens, dim] x Q^T     cpu_few_scores.h
//     output   O [queries, dim]     += P [queries, tokens] x V   cpu_few_values.h
//
// Running maxima and sums follow FlashAttention-2 (arXiv:2307.08691).

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>

#include "cpu_avx512_begin.h"
#include "cpu_attention_few.h"
#include "cpu_few_pass.h"
#include "cpu_few_scores.h"
#include "cpu_few_values.h"

namespace kvist::avx512 {
namespace {

// Tiles 0, 1, 4, 5 and 6 are full; 2 and 3, the outputs, and 7, the weights, have `rows` rows.
void tiles_for(int rows) {
    TileConfig config;
    for (int tile : {2, 3, 7}) config.rows[tile] = static_cast<std::uint8_t>(rows);
    configure(config);
}

class Job {
  public:
    Job(const Plan& plan, const char* arena, const Unit& unit, int head, int heads, FewScratch& scratch)
        : plan_(plan), shape_(plan.segments[unit.segment].geometry), blocks_(shape_, arena), unit_(unit), head_(head), heads_(heads),
          rows_(heads * shape_.repeats), factor_(plan.scale * 1.44269504f),
          scores_(shape_, blocks_, head, heads, scratch), values_(shape_, blocks_, head, scratch), s_(scratch) {}

    void run(const bf16* q) {
        tiles_for(shape_.repeats * values_.rows());
        const std::int64_t seen = plan_.segments[unit_.segment].seen[unit_.first_row];
        begin_ = unit_.first_key;
        if (plan_.window > 0) begin_ = std::max(begin_, seen - plan_.window + 1);
        end_ = std::min(unit_.end_key, seen + 1);
        const std::int64_t first = begin_ / kLanes * kLanes;
        fetch(first);
        scores_.pack(q);
        std::memset(s_.out, 0, sizeof(float) * rows_ * shape_.dim);
        std::memset(s_.sum, 0, sizeof(s_.sum));
        for (float& highest : s_.max) highest = kHidden;
        Cursor here(blocks_, unit_, shape_.block_tokens, first);
        Cursor ahead(blocks_, unit_, shape_.block_tokens, first + kAhead * kKeys);
        // A head's outputs follow the next one's scores, of this pass or the next: by then the matrix unit need not
        // wait for what they are made of.
        int turn = 0, late = -1, late_parts = 0;
        for (std::int64_t key = first; key < end_; key += kKeys) {
            Pass pass{};
            pass.first = key;
            pass.count = static_cast<int>(std::min<std::int64_t>(kKeys, end_ - key));
            while (pass.parts < kParts && here.next(end_, pass.places[pass.parts])) ++pass.parts;
            while (pass.ahead_parts < kParts && ahead.next(end_, pass.ahead[pass.ahead_parts])) ++pass.ahead_parts;
            for (int i = 0; i < heads_; ++i) {
                scores_.multiply(pass, i);
                if (late >= 0) values_.multiply(late_parts, late, 1 - turn);
                values_.unpack(pass, i, turn);
                scores_.finish(pass, i);
                if (late >= 0) values_.finish(late);
                for (int r = 0; r < shape_.repeats; ++r) softmax(pass, i * shape_.repeats + r, turn);
                if (values_.in_bytes()) values_.weigh(pass, i, turn);
                late = i;
                late_parts = pass.parts;
                turn = 1 - turn;
            }
        }
        values_.multiply(late_parts, late, 1 - turn);
        values_.finish(late);
    }

    void write(bf16* out, float* partials) {
        alignas(64) std::uint64_t places[2][8];
        values_.order(places);
        const __m512i first = _mm512_load_si512(places[0]), second = _mm512_load_si512(places[1]);
        const int width = shape_.dim + 2;
        for (int row = 0; row < rows_; ++row) {
            const float sum = _mm512_reduce_add_ps(_mm512_load_ps(s_.sum[row]));
            const __m512 share = _mm512_set1_ps(unit_.partial < 0 ? 1 / sum : 1);
            const std::int64_t result =
                static_cast<std::int64_t>(row % shape_.repeats) * shape_.kv_heads + head_ + row / shape_.repeats;
            const std::int64_t token = static_cast<std::int64_t>(unit_.first_row) * shape_.repeats * shape_.kv_heads;
            for (int d = 0; d < shape_.dim; d += kGroup) {
                const float* from = s_.out + row * shape_.dim + d;
                const __m512d a = _mm512_castps_pd(_mm512_mul_ps(share, _mm512_loadu_ps(from)));
                const __m512d b = _mm512_castps_pd(_mm512_mul_ps(share, _mm512_loadu_ps(from + kLanes)));
                const __m512 low = _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b));
                const __m512 high = _mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b));
                if (unit_.partial < 0) {
                    store(out + (token + result) * shape_.dim + d, low);
                    store(out + (token + result) * shape_.dim + d + kLanes, high);
                } else {
                    _mm512_storeu_ps(partials + unit_.partial + result * width + d, low);
                    _mm512_storeu_ps(partials + unit_.partial + result * width + d + kLanes, high);
                }
            }
            if (unit_.partial < 0) continue;
            partials[unit_.partial + result * width + shape_.dim] = s_.max[row];
            partials[unit_.partial + result * width + shape_.dim + 1] = sum;
        }
    }

  private:
    // Asks for what the first passes read, which no pass before them does.
    void fetch(std::int64_t first) const {
        const Fetch fetch(shape_);
        Cursor cursor(blocks_, unit_, shape_.block_tokens, first);
        for (int i = 0; i < kAhead; ++i) {
            Pass pass{};
            while (pass.ahead_parts < kParts && cursor.next(end_, pass.ahead[pass.ahead_parts])) ++pass.ahead_parts;
            for (int head = head_; head < head_ + heads_; ++head) {
                for (int part = 0; part < pass.ahead_parts; ++part) fetch.keys(pass, part, shape_.key_run(head), 0, 1);
                for (int part = 0; part < pass.ahead_parts; ++part) fetch.values(pass, part, shape_.value_run(head));
            }
        }
    }

    // P of a query from S; brings what was summed before to the new maximum. Keys that are not there are hidden.
    void softmax(const Pass& pass, int row, int turn) {
        const int start = static_cast<int>(std::max<std::int64_t>(0, begin_ - pass.first));
        const __m512 factor = _mm512_set1_ps(factor_);
        float* scores = s_.scores[row];
        __m512 x[kParts];
        for (int part = 0; part < kParts; ++part) x[part] = _mm512_load_ps(scores + part * kLanes);
        if (plan_.softcap > 0) {
            const __m512 inward = _mm512_set1_ps(plan_.scale / plan_.softcap);
            const __m512 outward = _mm512_set1_ps(plan_.softcap / plan_.scale);
            for (__m512& s : x) s = _mm512_mul_ps(outward, tanh(_mm512_mul_ps(s, inward)));
        }
        if (start > 0 || pass.count < kKeys) {
            const auto below = [](int key) { return (1u << std::clamp(key, 0, kLanes)) - 1; };
            for (int part = 0; part < kParts; ++part) {
                const unsigned seen = below(pass.count - part * kLanes) & ~below(start - part * kLanes);
                x[part] = _mm512_mask_mov_ps(_mm512_set1_ps(kHidden), static_cast<__mmask16>(seen), x[part]);
            }
        }
        const __m512 top = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])),
                                         _mm512_max_ps(_mm512_max_ps(x[4], x[5]), _mm512_max_ps(x[6], x[7])));
        const float highest = _mm512_reduce_max_ps(top) * factor_;
        __m512 sum = _mm512_load_ps(s_.sum[row]);
        if (highest > s_.max[row] + kSlack) {
            const __m512 alpha = exp2(_mm512_set1_ps(s_.max[row] - highest));
            s_.max[row] = highest;
            sum = _mm512_mul_ps(sum, alpha);
            float* out = s_.out + row * shape_.dim;
            for (int d = 0; d < shape_.dim; d += kLanes)
                _mm512_storeu_ps(out + d, _mm512_mul_ps(alpha, _mm512_loadu_ps(out + d)));
        }
        TILE_STAY_AWAKE();
        const __m512 less = _mm512_set1_ps(s_.max[row]);
        for (__m512& s : x) s = exp2_roughly(_mm512_fmsub_ps(s, factor, less));
        sum = _mm512_add_ps(sum, _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
        sum = _mm512_add_ps(sum, _mm512_add_ps(_mm512_add_ps(x[4], x[5]), _mm512_add_ps(x[6], x[7])));
        _mm512_store_ps(s_.sum[row], sum);
        for (int part = 0; part < kParts; part += 2) {
            if (values_.in_bytes()) {
                _mm512_store_ps(scores + part * kLanes, x[part]);
                _mm512_store_ps(scores + (part + 1) * kLanes, x[part + 1]);
            } else {
                store_pair(s_.p[turn][row] + part * kLanes, x[part], x[part + 1]);
            }
        }
    }

    const Plan& plan_;
    const Geometry& shape_;
    const Blocks blocks_;
    const Unit& unit_;
    const int head_, heads_, rows_;
    const float factor_;
    std::int64_t begin_ = 0, end_ = 0;
    FewScores scores_;
    FewValues values_;
    FewScratch& s_;
};

}  // namespace

void attend_few(Plan& plan, const char* arena, const bf16* q, std::int64_t q_stride, const Unit& unit, int head,
                int heads, bf16* out) {
    Job job(plan, arena, unit, head, heads, of_this_thread<FewScratch>());
    job.run(q + unit.first_row * q_stride);
    job.write(out, plan.partials.data());
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

#include "cpu_attention_few.h"

namespace kvist::avx512 {
void attend_few(Plan&, const char*, const bf16*, std::int64_t, const Unit&, int, int, bf16*) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
