// A step's keys and values on their way into blocks, and numbers of any type. Included inside a namespace, once a build.

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
