// Asking for keys and values before they are met. Included inside a namespace, once a build.

constexpr int kSixteen = 16;  // tokens that lie side by side, whatever the block

// Keys of one layer that a task meets.
struct Keys {
    const Segment* segment;
    const Unit* unit;
    std::int64_t begin, end;

    Keys(const Plan& plan, const Unit& of)
        : segment(&plan.segments[of.segment]), unit(&of), begin(of.first_key), end(of.end_key) {
        std::int64_t least = segment->seen[of.first_row], most = least;
        for (int row = of.first_row; row < of.end_row; ++row) {
            least = std::min(least, segment->seen[row]);
            most = std::max(most, segment->seen[row]);
        }
        end = std::min(end, most + 1);
        if (plan.window > 0) begin = std::max(begin, least - plan.window + 1);
    }
    // Tokens before the first that counts lie in the same block, and were written.
    std::int64_t first() const { return begin / kSixteen * kSixteen; }
};

// Up to 128 keys and values that are met next, in the order in which they lie. No processor guesses where the next block
// lies, and what is asked for all at once waits for each other: a few lines at a time lie behind the arithmetic.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const Keys& keys, std::int64_t first, int slot, int first_head, int heads)
        : shape_(&keys.segment->geometry), arena_(keys.segment->layer(slot)), offsets_(keys.unit->offsets), first_(first),
          first_head_(first_head), end_head_(first_head + heads), head_(first_head) {
        const std::int64_t keys_ahead = std::min<std::int64_t>(kKeys, keys.end - first);
        left_ = heads * 2 * static_cast<int>((keys_ahead + kSixteen - 1) / kSixteen);
    }

    // As much as was met, and a line for its scales.
    __attribute__((always_inline)) void some(std::int64_t bytes) {
        for (bytes += kLine; bytes > 0; bytes -= kLine) {
            if (at_ >= end_ && !next_run()) return;
            __builtin_prefetch(at_, 0, kSecondCache);
            at_ += kLine;
        }
    }
    void rest() {
        while (at_ < end_ || next_run()) some(end_ - at_);
    }

  private:
    static constexpr std::int64_t kLine = 64;
    static constexpr int kSecondCache = 2;  // what is met next is larger than the first

    __attribute__((noinline)) bool next_run() {
        if (left_ == 0) return false;
        const std::int64_t key = first_ + sixteen_ * kSixteen;
        const char* block = arena_ + offsets_[key / shape_->block_tokens];
        const Side side{values_ ? shape_->value : shape_->key, shape_->block_tokens, shape_->dim};
        at_ = block + (values_ ? shape_->value_run(head_) : shape_->key_run(head_));
        std::int64_t bytes = values_ ? shape_->value_run_bytes : shape_->key_run_bytes;
        // Of a run with scales all, where it is a block of sixteen tokens; in longer ones they lie here and there.
        if (side.tokens > kSixteen) {
            bytes = has_scales(side.codec) ? 0 : kSixteen * side.row_bytes();
            at_ += key % side.tokens * side.row_bytes();
        }
        end_ = at_ + bytes;
        --left_;
        if (++head_ == end_head_) {
            head_ = first_head_;
            sixteen_ += values_;
            values_ = !values_;
        }
        return at_ < end_ || next_run();
    }

    const Geometry* shape_ = nullptr;
    const char *arena_ = nullptr, *at_ = nullptr, *end_ = nullptr;
    const std::int64_t* offsets_ = nullptr;
    std::int64_t first_ = 0;
    int first_head_ = 0, end_head_ = 0, head_ = 0, sixteen_ = 0, left_ = 0;
    bool values_ = false;
};
