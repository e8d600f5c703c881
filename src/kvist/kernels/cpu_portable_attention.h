// Attention over blocks of any codec, in float32. Included inside a namespace, once a build.
//
//     scores   S [queries, keys]   = Q x K^T      keys are read 32 at a time, for all queries of a job
//     output   O [queries, dim]   += P x V        values without scales likewise
//              O^T a group of 32  += C^T x (P s)  of values with scales the codes as they are, 128 tokens of 32 dims at a
//                                                 time; the scale goes into the weights, the least value into a sum
//
// Running maxima and sums follow FlashAttention-2 (arXiv:2307.08691).

constexpr int kKeys = 128;  // of one pass
constexpr int kTile = 32;   // keys, or values, read at a time
constexpr float kHidden = -1e30f;
constexpr float kLog2E = 1.44269504f;

static void load_row(Type type, const void* from, std::int64_t first, int count, float* to) {
    for (int d = 0; d < count; d += kLanes) {
        if (type == Type::kFloat32) store(to + d, load(static_cast<const float*>(from) + first + d));
        if (type == Type::kBfloat16) store(to + d, load_bf16(static_cast<const bf16*>(from) + first + d));
        if (type == Type::kFloat16) store(to + d, load_f16(static_cast<const std::uint16_t*>(from) + first + d));
    }
}

static void store_row(Type type, void* to, std::int64_t first, int count, const float* from, float factor) {
    if (type == Type::kFloat32) {
        for (int d = 0; d < count; ++d) static_cast<float*>(to)[first + d] = from[d] * factor;
    } else if (type == Type::kBfloat16) {
        for (int d = 0; d < count; ++d) static_cast<bf16*>(to)[first + d] = to_bf16(from[d] * factor);
    } else {
        for (int d = 0; d < count; ++d) static_cast<std::uint16_t*>(to)[first + d] = to_f16(from[d] * factor);
    }
}

// What a thread works in, for as long as it lives.
static Buffer& of_this_thread() {
    static thread_local Buffer buffer;
    return buffer;
}

class Job {
  public:
    Job(const Plan& plan, const Segment& segment, const Call& call)
        : plan_(plan), segment_(segment), shape_(segment.geometry), arena_(segment.layer(call.slot)), call_(call), keys_{shape_.key, shape_.block_tokens, shape_.dim},
          values_{shape_.value, shape_.block_tokens, shape_.dim} {}

    void run(const Unit& unit, int head, float* partials) {
        unit_ = &unit;
        head_ = head;
        queries_ = (unit.end_row - unit.first_row) * shape_.repeats;
        reserve();
        std::int64_t least = segment_.seen[unit.first_row], most = least;
        for (int row = unit.first_row; row < unit.end_row; ++row) {
            least = std::min(least, segment_.seen[row]);
            most = std::max(most, segment_.seen[row]);
        }
        begin_ = unit.first_key;
        end_ = std::min(unit.end_key, most + 1);
        if (plan_.window > 0) begin_ = std::max(begin_, least - plan_.window + 1);
        read_queries();
        // Tokens before the first that counts lie in the same block, and were written.
        for (std::int64_t key = begin_ / 16 * 16; key < end_; key += kKeys) pass(key);
        write(partials);
    }

  private:
    void reserve() {
        const std::int64_t n = queries_, dim = shape_.dim;
        const std::int64_t tile = std::max<std::int64_t>(kTile * dim, kGroup * kKeys);
        float** const arrays[] = {&q_, &out_, &scores_, &weights_, &tile_, &scale_, &least_, &max_, &sum_};
        const std::int64_t sizes[] = {n * dim, n * dim, n * kKeys, n * kKeys, tile, kKeys, kKeys, n, n};
        // Sanitized, an array's end is one.
        constexpr std::int64_t kFence = kSanitized ? kLanes : 0;
        std::int64_t floats = 0;
        for (const std::int64_t size : sizes) floats += size + kFence;
        const auto bytes = sizeof(float) * static_cast<std::size_t>(floats);
        auto* at = static_cast<float*>(of_this_thread().reserve(bytes));
        permit(at, bytes);
        for (int i = 0; i < 9; ++i) {
            *arrays[i] = at;
            at += sizes[i];
            forbid(at, sizeof(float) * kFence);
            at += kFence;
        }
    }

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
        for (int at = 0; at < count; at += kTile) {
            const int some = std::min(kTile, padded - at);
            read_tile(keys_, shape_.key_run(head_), first + at, std::min(some, count - at));
            dots<false>(q_, queries_, shape_.dim, tile_, shape_.dim, some, shape_.dim, scores_ + at, kKeys);
        }
        bool seen = false;
        for (int i = 0; i < queries_; ++i) seen |= softmax(i, first, padded);
        if (!seen) return;
        if (has_scales(shape_.value)) {
            for (int g = 0; g < values_.groups(); ++g) add_group(first, count, padded, g);
            return;
        }
        for (int at = 0; at < count; at += kTile) {
            const int some = std::min(kTile, count - at);
            read_tile(values_, shape_.value_run(head_), first + at, some);
            add_rows(scores_ + at, queries_, kKeys, tile_, shape_.dim, shape_.dim, some, out_, shape_.dim);
        }
    }

    // Rows of tokens from `key` on, which may lie in several blocks; those behind are left as they were.
    void read_tile(const Side& side, std::int64_t place, std::int64_t key, int count) {
        for (int at = 0; at < count;) {
            const int slot = slot_of(key + at);
            const int some = std::min(count - at, shape_.block_tokens - slot);
            read_rows(side, block_of(key + at) + place, slot, some, tile_ + static_cast<std::int64_t>(at) * shape_.dim);
            at += some;
        }
    }

    // O += P x V for 32 dims of values with scales.
    void add_group(std::int64_t first, int count, int padded, int g) {
        for (int at = 0; at < padded;) {
            const int slot = slot_of(first + at);
            const int some = std::min(padded - at, shape_.block_tokens - slot);
            const char* run = block_of(first + at) + shape_.value_run(head_);
            read_codes(values_, run, slot, some, g, tile_ + at, kKeys);
            read_scales(values_, run, slot, some, std::clamp(count - at, 0, some), g, scale_ + at, least_ + at);
            at += some;
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
        dots<true>(weights_, queries_, kKeys, tile_, kKeys, kGroup, padded, out_ + g * kGroup, shape_.dim);
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
    const Unit* unit_ = nullptr;
    int head_ = 0, queries_ = 0;
    std::int64_t begin_ = 0, end_ = 0;
    float *q_ = nullptr, *out_ = nullptr, *scores_ = nullptr, *weights_ = nullptr, *tile_ = nullptr, *scale_ = nullptr,
          *least_ = nullptr, *max_ = nullptr, *sum_ = nullptr;
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

// Stores one head's key of a token, or its value: `dim` numbers of a type from `at` on.
static void write_key(const Geometry& shape, Type type, const void* from, std::int64_t at, char* block, int slot,
                      int head) {
    float x[kMaxDim];
    load_row(type, from, at, shape.dim, x);
    write_row({shape.key, shape.block_tokens, shape.dim}, block + shape.key_run(head), slot, x);
}

static void write_value(const Geometry& shape, Type type, const void* from, std::int64_t at, char* block, int slot,
                        int head) {
    const Side side{shape.value, shape.block_tokens, shape.dim};
    float x[kMaxDim];
    load_row(type, from, at, shape.dim, x);
    if (has_scales(shape.value))
        write_column(side, block + shape.value_run(head), slot, x);
    else
        write_row(side, block + shape.value_run(head), slot, x);
}

// Stores the key and the value of one row, of every KV head.
static void append(const Plan& plan, const Call& call, std::int64_t row) {
    const Segment& open = plan.segments[plan.open];
    const Geometry& shape = open.geometry;
    char* block = open.layer(call.slot) + plan.append[row];
    const int slot = plan.append_slots[row];
    for (int head = 0; head < shape.kv_heads; ++head) {
        const std::int64_t key = row * call.kv_stride + head * shape.dim;
        write_key(shape, call.type, call.kv, key, block, slot, head);
        write_value(shape, call.type, call.kv, key + shape.kv_heads * shape.dim, block, slot, head);
    }
}

// Seals one head's keys of the run of tokens that begins with `first` of the plan's, which follow each other.
static void seal_channels(const Plan& plan, const Call& call, std::int64_t first, int head) {
    const Segment& open = plan.segments[plan.open];
    const Segment& body = plan.segments.front();
    const Geometry& shape = body.geometry;
    static_assert(kChannelRun == kGroup, "a channel's numbers are packed like those of a group");
    float x[kChannelRun * kMaxDim];
    for (int t = 0; t < kChannelRun; ++t) {
        const Sealed& token = plan.sealed[first + t];
        const char* from = open.layer(call.slot) + token.from + open.geometry.key_run(head);
        load_row(call.type, from, static_cast<std::int64_t>(token.from_slot) * shape.dim, shape.dim, x + t * shape.dim);
    }
    const Sealed& token = plan.sealed[first];
    char* to = body.layer(call.slot) + token.to + shape.key_run(head);
    write_run({shape.key, shape.block_tokens, shape.dim}, to, token.to_slot, x);
}

// Moves a token from the open segment, which holds numbers of the call's type, to the first.
static void seal(const Plan& plan, const Call& call, std::int64_t index) {
    const Sealed& token = plan.sealed[index];
    const Segment& open = plan.segments[plan.open];
    const Segment& body = plan.segments.front();
    const Geometry& shape = body.geometry;
    const char* from = open.layer(call.slot) + token.from;
    char* to = body.layer(call.slot) + token.to;
    const std::int64_t at = static_cast<std::int64_t>(token.from_slot) * shape.dim;
    for (int head = 0; head < shape.kv_heads; ++head) {
        if (shape.key != Codec::kInt4Channels)
            write_key(shape, call.type, from + open.geometry.key_run(head), at, to, token.to_slot, head);
        else if (token.to_slot % kChannelRun == 0)
            seal_channels(plan, call, index, head);
        write_value(shape, call.type, from + open.geometry.value_run(head), at, to, token.to_slot, head);
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
        for (;;) {
            const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
            if (index >= jobs) break;
            const Task& task = plan.tasks[index];
            const Unit& unit = plan.units[task.unit];
            Job job(plan, plan.segments[unit.segment], call);
            for (int head = task.head; head < task.head + task.heads; ++head)
                job.run(unit, head, plan.partials.data());
        }
    });
    team.share(static_cast<std::int64_t>(plan.merged_rows.size()), 8,
               [&](std::int64_t index) { merge(plan, call, index); });
}
