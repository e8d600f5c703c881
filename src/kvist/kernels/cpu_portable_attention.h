// Attention over blocks of any codec, in float32. Included inside a namespace, once a build.
//
//     scores   S [queries, keys]   = Q x K^T
//     output   O [queries, dim]   += P x V
//
// 128 keys at a time. Few queries meet keys and values as they are stored; of values with scales the codes, whose scale
// goes into the weights and whose least value into a sum. For many, keys and values are unpacked once, keys as columns.
//
// Running maxima and sums follow FlashAttention-2 (arXiv:2307.08691).

constexpr int kFew = 8;     // queries that are few
constexpr int kTurned = 2 * KVIST_LANES < 16 ? 16 : 2 * KVIST_LANES;  // keys that are turned at a time
constexpr float kHidden = -1e30f;
constexpr float kLog2E = 1.44269504f;

// What a thread works in, for as long as it lives.
static Buffer& of_this_thread() {
    static thread_local Buffer buffer;
    return buffer;
}

class Job {
  public:
    Job(const Plan& plan, const Keys& keys, const Call& call)
        : plan_(plan), segment_(*keys.segment), shape_(segment_.geometry), arena_(segment_.layer(call.slot)), call_(call),
          keys_{shape_.key, shape_.block_tokens, shape_.dim}, values_{shape_.value, shape_.block_tokens, shape_.dim},
          met_(keys), unit_(keys.unit), begin_(keys.begin), end_(keys.end) {}

    // Heads `first_head … first_head + heads - 1`. All of them meet 128 keys, which lie side by side, before the next;
    // `next` is asked for at last.
    void run(int first_head, int heads, const Ahead& next, float* partials) {
        first_head_ = first_head;
        heads_ = heads;
        queries_ = (unit_->end_row - unit_->first_row) * shape_.repeats;
        reserve();
        each_head([&] { read_queries(); });
        for (std::int64_t key = met_.first(); key < end_; key += kKeys) {
            ahead_ = key + kKeys < end_ ? Ahead(met_, key + kKeys, call_.slot, first_head, heads) : next;
            each_head([&] { pass(key); });
            ahead_.rest();
        }
        each_head([&] { write(partials); });
    }

  private:
    void reserve() {
        const std::int64_t n = queries_, dim = shape_.dim;
        const bool few = n <= kFew;
        struct Array {
            float** at;
            std::int64_t floats;
        };
        const std::int64_t all = heads_ * n;
        const Array arrays[] = {
            {&all_q_, all * dim},
            {&all_out_, all * dim},
            {&all_max_, all},
            {&all_sum_, all},
            {&scores_, n * kKeys},
            {&weights_, few ? n * kKeys : 0},
            {&columns_, few ? 0 : kTurned * dim},
            {&rows_, few ? 0 : kKeys * stride()},
            {&scale_, std::max(std::max<std::int64_t>(kKeys, 2 * dim), std::int64_t{kSixteen} * scale_step(keys_))},
            {&least_, kKeys},
        };
        // Sanitized, an array's end is one.
        constexpr std::int64_t kFence = kSanitized ? kLanes : 0;
        std::int64_t floats = 0;
        for (const Array& array : arrays) floats += array.floats + kFence;
        const auto bytes = sizeof(float) * static_cast<std::size_t>(floats);
        auto* at = static_cast<float*>(of_this_thread().reserve(bytes));
        permit(at, bytes);
        for (const Array& array : arrays) {
            *array.at = at;
            at += array.floats;
            forbid(at, sizeof(float) * kFence);
            at += kFence;
        }
    }

    template <class Some>
    void each_head(Some&& some) {
        for (int h = 0; h < heads_; ++h) {
            const std::int64_t before = static_cast<std::int64_t>(h) * queries_;
            head_ = first_head_ + h;
            q_ = all_q_ + before * shape_.dim;
            out_ = all_out_ + before * shape_.dim;
            max_ = all_max_ + before;
            sum_ = all_sum_ + before;
            some();
        }
    }

    // Of values that are unpacked: an odd number of cache lines, or they would share a few places of the nearest cache.
    int stride() const { return shape_.dim + 16; }

    std::int64_t seen(int index) const { return segment_.seen[unit_->first_row + index / shape_.repeats]; }

    // Place of a query, or of its result, in heads.
    std::int64_t place(int index) const {
        return index % shape_.repeats * static_cast<std::int64_t>(shape_.kv_heads) + head_;
    }

    // Scores come out as they are capped, or in powers of two.
    void read_queries() {
        const float factor = plan_.softcap > 0 ? plan_.scale / plan_.softcap : plan_.scale * kLog2E;
        for (int i = 0; i < queries_; ++i) {
            const std::int64_t row = unit_->first_row + i / shape_.repeats;
            float* q = q_ + static_cast<std::int64_t>(i) * shape_.dim;
            load_row(call_.type, call_.q, row * call_.q_stride + place(i) * shape_.dim, shape_.dim, q);
            for (int d = 0; d < shape_.dim; ++d) q[d] *= factor;
            max_[i] = kHidden;
            sum_[i] = 0;
        }
        std::memset(out_, 0, sizeof(float) * static_cast<std::size_t>(queries_) * static_cast<std::size_t>(shape_.dim));
    }

    const char* block_of(std::int64_t key) const { return arena_ + unit_->offsets[key / shape_.block_tokens]; }
    int slot_of(std::int64_t key) const { return static_cast<int>(key % shape_.block_tokens); }

    // Keys `first … first + 127`, as many as there are; `first` is a multiple of 16.
    void pass(std::int64_t first) {
        const int count = static_cast<int>(std::min<std::int64_t>(kKeys, end_ - first));
        const int padded = (count + 15) / 16 * 16;
        const bool few = queries_ <= kFew;
        if (few)
            score_few(first, padded);
        else
            score_many(first, count);
        bool seen = false;
        for (int i = 0; i < queries_; ++i) seen |= softmax(i, first, padded);
        if (!seen) return;
        if (few)
            add_few(first, count, padded);
        else
            add_many(first, count);
    }

    void score_few(std::int64_t first, int padded) {
        for (int at = 0; at < padded; at += kSixteen) {
            const char* run = block_of(first + at) + shape_.key_run(head_);
            const int slot = slot_of(first + at);
            read_row_scales(keys_, run, slot, scale_);
            few_scores(keys_, q_, queries_, run, slot, scale_, scores_ + at, ahead_);
        }
    }

    void add_few(std::int64_t first, int count, int padded) {
        const char* sixteens[kKeys / kSixteen];
        const bool codes = has_scales(shape_.value);
        const std::int64_t token_bytes = codes ? 1 : values_.row_bytes();
        for (int at = 0; at < padded; at += kSixteen)
            sixteens[at / kSixteen] =
                block_of(first + at) + shape_.value_run(head_) + slot_of(first + at) * token_bytes;
        if (!codes) return few_values(values_, scores_, queries_, sixteens, count, out_, ahead_);
        for (int g = 0; g < values_.groups(); ++g) {
            weigh_group(first, count, padded, g);
            few_codes(values_, weights_, queries_, sixteens, g, padded, out_, ahead_);
        }
    }

    // Weights of codes of 32 dims; adds their least values.
    void weigh_group(std::int64_t first, int count, int padded, int g) {
        for (int at = 0; at < padded; at += kSixteen) {
            const char* run = block_of(first + at) + shape_.value_run(head_);
            const int filled = std::clamp(count - at, 0, kSixteen);
            read_scales(values_, run, slot_of(first + at), kSixteen, filled, g, scale_ + at, least_ + at);
        }
        for (int i = 0; i < queries_; ++i) {
            const float* from = scores_ + static_cast<std::int64_t>(i) * kKeys;
            float* to = weights_ + static_cast<std::int64_t>(i) * kKeys;
            Floats constant = {};
            for (int t = 0; t < padded; t += kLanes) {
                const Floats weight = load(from + t);
                store(to + t, weight * load(scale_ + t));
                if (!values_.bytewise()) constant += weight * load(least_ + t);
            }
            if (values_.bytewise()) continue;
            const float each = sum_of(constant);
            float* out = out_ + static_cast<std::int64_t>(i) * shape_.dim + g * kGroup;
            for (int d = 0; d < kGroup; d += kLanes) store(out + d, load(out + d) + each);
        }
    }

    void score_many(std::int64_t first, int count) {
        for (int at = 0; at < count; at += kTurned) {
            const int some = std::min(kTurned, (count - at + 15) / 16 * 16);
            ahead_.some(some * keys_.row_bytes());
            read_tile(keys_, shape_.key_run(head_), first + at, std::min(some, count - at));
            transpose(rows_, stride(), some, shape_.dim, columns_, kTurned);
            product<false>(q_, queries_, shape_.dim, columns_, kTurned, some, shape_.dim, scores_ + at, kKeys);
        }
    }

    void add_many(std::int64_t first, int count) {
        ahead_.some(count * values_.row_bytes());
        if (has_scales(shape_.value)) {
            for (int at = 0; at < count; at += kSixteen) turn_values(first + at, rows_ + at * stride());
        } else {
            read_tile(values_, shape_.value_run(head_), first, count);
        }
        product<true>(scores_, queries_, kKeys, rows_, stride(), shape_.dim, count, out_, shape_.dim);
    }

    // Rows of tokens from `key` on, which may lie in several blocks; those behind are left as they were.
    void read_tile(const Side& side, std::int64_t place, std::int64_t key, int count) {
        for (int at = 0; at < count;) {
            const int slot = slot_of(key + at);
            const int some = std::min(count - at, shape_.block_tokens - slot);
            read_rows(side, block_of(key + at) + place, slot, some, rows_ + static_cast<std::int64_t>(at) * stride(),
                      stride());
            at += some;
        }
    }

    // Rows of sixteen tokens whose values have scales.
    void turn_values(std::int64_t key, float* to) {
        const char* run = block_of(key) + shape_.value_run(head_);
        const int slot = slot_of(key);
        float codes[kGroup * kSixteen];
        for (int g = 0; g < values_.groups(); ++g, to += kGroup) {
            read_codes(values_, run, slot, kSixteen, g, codes, kSixteen);
            read_scales(values_, run, slot, kSixteen, kSixteen, g, scale_, least_);
            for (int d = 0; d < kGroup; ++d) {
                for (int t = 0; t < kSixteen; t += kLanes) {
                    float* at = codes + d * kSixteen + t;
                    const Floats value = load(at) * load(scale_ + t);
                    store(at, values_.bytewise() ? value : value + load(least_ + t));
                }
            }
            transpose(codes, kSixteen, kGroup, kSixteen, to, stride());
        }
    }

    // Weights of one query from its scores; brings what was summed before to the new maximum. Whether it sees any key.
    bool softmax(int i, std::int64_t first, int padded) {
        float* scores = scores_ + static_cast<std::int64_t>(i) * kKeys;
        const std::int64_t at = seen(i);
        const std::int64_t begin = plan_.window > 0 ? std::max(begin_, at - plan_.window + 1) : begin_;
        const auto from = static_cast<int>(std::clamp<std::int64_t>(begin - first, 0, padded));
        const auto to = static_cast<int>(std::clamp<std::int64_t>(std::min(end_, at + 1) - first, 0, padded));
        if (from >= to) {
            for (int t = 0; t < padded; t += kLanes) store(scores + t, Floats{});
            return false;
        }
        if (plan_.softcap > 0)
            for (int t = 0; t < padded; t += kLanes) store(scores + t, tanh(load(scores + t)) * (plan_.softcap * kLog2E));
        // What is not seen may be no number.
        for (int t = 0; t < from; ++t) scores[t] = kHidden;
        for (int t = to; t < padded; ++t) scores[t] = kHidden;
        Floats most = load(scores);
        for (int t = kLanes; t < padded; t += kLanes) most = larger(most, load(scores + t));
        const float highest = std::max(max_[i], largest_of(most));
        Floats sum = {};
        for (int t = 0; t < padded; t += kLanes) {
            const Floats weight = exp2(load(scores + t) - highest);
            store(scores + t, weight);
            sum += weight;
        }
        if (highest > max_[i]) {
            const float less = exp2(all(max_[i] - highest))[0];
            sum_[i] *= less;
            float* out = out_ + static_cast<std::int64_t>(i) * shape_.dim;
            for (int d = 0; d < shape_.dim; d += kLanes) store(out + d, load(out + d) * less);
            max_[i] = highest;
        }
        sum_[i] += sum_of(sum);
        return true;
    }

    void write(float* partials) const {
        const std::int64_t heads = static_cast<std::int64_t>(shape_.repeats) * shape_.kv_heads;
        for (int i = 0; i < queries_; ++i) {
            const float* out = out_ + static_cast<std::int64_t>(i) * shape_.dim;
            const std::int64_t row = i / shape_.repeats;
            if (unit_->partial < 0) {
                const std::int64_t result = (unit_->first_row + row) * heads + place(i);
                const float share = share_of(call_, place(i), max_[i], sum_[i]);
                store_row(call_.type, call_.out, result * shape_.dim, shape_.dim, out, share);
                continue;
            }
            float* to = partials + unit_->partial + (row * heads + place(i)) * (shape_.dim + 2);
            std::memcpy(to, out, sizeof(float) * static_cast<std::size_t>(shape_.dim));
            to[shape_.dim] = max_[i];
            to[shape_.dim + 1] = sum_[i];
        }
    }

  public:
    // By what a result is multiplied: one over the sum, in which a sink takes part.
    static float share_of(const Call& call, std::int64_t head, float most, float sum) {
        if (call.sinks == nullptr) return 1 / sum;
        const float sink = call.sinks[head] * kLog2E;
        if (sink <= most) return 1 / (sum + exp2(all(sink - most))[0]);
        const float less = exp2(all(most - sink))[0];
        return less / (sum * less + 1);
    }

  private:
    const Plan& plan_;
    const Segment& segment_;
    const Geometry& shape_;
    const char* const arena_;
    const Call& call_;
    const Side keys_, values_;
    const Keys& met_;
    const Unit* const unit_;
    const std::int64_t begin_, end_;
    Ahead ahead_;
    int first_head_ = 0, heads_ = 0, head_ = 0, queries_ = 0;
    float *q_ = nullptr, *out_ = nullptr, *scores_ = nullptr, *weights_ = nullptr, *columns_ = nullptr,
          *rows_ = nullptr, *scale_ = nullptr, *least_ = nullptr, *max_ = nullptr, *sum_ = nullptr,
          *all_q_ = nullptr, *all_out_ = nullptr, *all_max_ = nullptr, *all_sum_ = nullptr;
};

// Merges the results of row `index` of the plan's `merged_rows` (FlashInfer's cascade, arXiv:2501.01005).
static void merge(const Plan& plan, const Call& call, std::int64_t index) {
    const Geometry& shape = plan.shape();
    const int row = plan.merged_rows[index];
    const int heads = shape.repeats * shape.kv_heads;
    const Partial* begin = plan.partial.data() + plan.partial_begin[index];
    const Partial* end = plan.partial.data() + plan.partial_begin[index + 1];
    for (int head = 0; head < heads; ++head) {
        const auto result = [&](const Partial* part) {
            const std::int64_t at = static_cast<std::int64_t>(row - part->first_row) * heads + head;
            return plan.partials.data() + part->base + at * (shape.dim + 2);
        };
        float highest = kHidden;
        for (const Partial* part = begin; part < end; ++part) highest = std::max(highest, result(part)[shape.dim]);
        float out[kMaxDim] = {}, sum = 0;
        for (const Partial* part = begin; part < end; ++part) {
            const float* from = result(part);
            const float weight = exp2(all(from[shape.dim] - highest))[0];
            sum += weight * from[shape.dim + 1];
            for (int d = 0; d < shape.dim; d += kLanes) store(out + d, load(out + d) + load(from + d) * weight);
        }
        const std::int64_t place = static_cast<std::int64_t>(row) * heads + head;
        store_row(call.type, call.out, place * shape.dim, shape.dim, out, Job::share_of(call, head, highest, sum));
    }
}

void attend(Plan& plan, const Team& team, const Call& call) {
    team.share(static_cast<std::int64_t>(plan.append.size()), 16,
               [&](std::int64_t row) { append(plan, call, row); });
    team.share(static_cast<std::int64_t>(plan.sealed.size()), 16,
               [&](std::int64_t index) { seal(plan, call, index); });
    const auto jobs = static_cast<std::int64_t>(plan.tasks.size());
    std::atomic<std::int64_t> next{0};
    team.run([&](int) {
        const auto first_of = [&](std::int64_t index) {
            if (index >= jobs) return Ahead();
            const Task& task = plan.tasks[index];
            const Keys keys(plan, plan.units[task.unit]);
            return Ahead(keys, keys.first(), call.slot, task.head, task.heads);
        };
        for (bool begun = false;; begun = true) {
            const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
            if (index >= jobs) break;
            if (!begun) first_of(index).rest();
            const Task& task = plan.tasks[index];
            const Keys keys(plan, plan.units[task.unit]);
            Job job(plan, keys, call);
            // Another thread may take it first, which costs what was asked for.
            job.run(task.head, task.heads, first_of(next.load(std::memory_order_relaxed)), plan.partials.data());
        }
    });
    team.share(static_cast<std::int64_t>(plan.merged_rows.size()), 8,
               [&](std::int64_t index) { merge(plan, call, index); });
}
