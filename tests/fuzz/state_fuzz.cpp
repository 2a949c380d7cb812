// Feeds mutated saved states to a llama_context. A crash ends the process; the driver (fuzz_run.py) goes on after it.
//
//   state_fuzz make MODEL KV PROTECT FLASH N_SEQ PROFILE DIR                      writes DIR/{memory,context,session,sequence}
//   state_fuzz run  MODEL KV PROTECT FLASH N_SEQ PROFILE DIR FROM TO SEED         mutates them; DIR/<kind>.marks: where the numbers are
//
// Mutation i depends on SEED and i alone. DIR/at holds the number of the one that is being tried.

#include "ggml.h"
#include "llama.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using bytes = std::vector<uint8_t>;

static const int N_PROMPT = 40;
static const char * const KINDS[] = { "memory", "context", "session", "sequence" };

[[noreturn]] static void fail(const std::string & what) {
    fprintf(stderr, "state_fuzz: %s\n", what.c_str());
    abort();
}

static bytes read_file(const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) {
        fail("no file " + path);
    }
    return bytes(std::istreambuf_iterator<char>(in), {});
}

static void write_file(const std::string & path, const bytes & data) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write((const char *) data.data(), data.size());
    if (!out.flush()) {
        fail("cannot write " + path);
    }
}

struct dice {
    uint64_t state;

    uint64_t next() {
        state += 0x9e3779b97f4a7c15ull;
        uint64_t z = state;
        z = (z ^ (z >> 30))*0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27))*0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }

    size_t below(size_t n) {
        return n ? next() % n : 0;
    }
};

struct base {
    bytes data;
    std::vector<uint32_t> marks;
};

// Four of five changes meet a number of the headers or the cells: K and V are nearly all of the file, and any value there is legal.
static bytes mutated(const base & from, const base & other, dice & d) {
    static const uint32_t odd[] = { 0, 1, 2, 3, 31, 32, 63, 64, 255, 256, 257, 1024, 65536, 65537, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, 0x3150564b };

    bytes res = from.data;

    const size_t n = 1 + d.below(3);
    for (size_t i = 0; i < n && !res.empty(); ++i) {
        const bool   exact = d.below(5) != 0 && !from.marks.empty();
        const size_t at    = (exact ? from.marks[d.below(from.marks.size())] : d.below(res.size())) % res.size();
        const size_t room  = res.size() - at;

        switch (d.below(8)) {
            case 0:
                res[at + d.below(std::min<size_t>(4, room))] ^= 1u << d.below(8);
                break;
            case 1:
            case 2: {
                const uint32_t value = d.below(4) ? odd[d.below(sizeof(odd)/sizeof(odd[0]))] : (uint32_t) d.next();
                memcpy(&res[at], &value, std::min<size_t>(4, room));
            } break;
            case 3: {
                uint32_t value = 0;
                memcpy(&value, &res[at], std::min<size_t>(4, room));
                value += (uint32_t) d.below(9) - 4;
                memcpy(&res[at], &value, std::min<size_t>(4, room));
            } break;
            case 4:
                res.resize(at);
                break;
            case 5:
                res.erase(res.begin() + at, res.begin() + at + std::min<size_t>(1 + d.below(64), room));
                break;
            case 6: {
                const size_t from_at = d.below(other.data.size());
                const size_t size    = std::min<size_t>(1 + d.below(512), other.data.size() - from_at);
                res.insert(res.begin() + at, other.data.begin() + from_at, other.data.begin() + from_at + size);
            } break;
            case 7:
                for (size_t k = 0; k < std::min<size_t>(1 + d.below(64), room); ++k) {
                    res[at + k] = (uint8_t) d.next();
                }
                break;
        }
    }

    return res;
}

struct subject {
    llama_model   * model = nullptr;
    llama_context * ctx   = nullptr;
    int32_t         n_vocab = 0;

    std::vector<float> expected; // logits after one token in an empty cache

    llama_memory_t memory() const {
        return llama_get_memory(ctx);
    }

    bool decode(int n, llama_pos first, llama_seq_id seq) const {
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i]     = 3 + (i*7 + 11) % 200;
            batch.pos[i]       = first + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = seq;
            batch.logits[i]    = i == n - 1;
        }
        const int status = llama_decode(ctx, batch);
        llama_batch_free(batch);
        return status == 0;
    }

    std::vector<float> logits() const {
        const float * row = llama_get_logits_ith(ctx, -1);
        return std::vector<float>(row, row + n_vocab);
    }
};

static ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * found = ggml_type_name((ggml_type) i);
        if (found && name == found) {
            return (ggml_type) i;
        }
    }
    fail("no type " + name);
}

static subject open_subject(char ** argv) {
    const std::string kv = argv[1];
    const size_t slash = kv.find('/');

    const llama_model_params mparams = llama_model_default_params();

    subject res;
    res.model = llama_model_load_from_file(argv[0], mparams);
    if (!res.model) {
        fail("the model could not be loaded");
    }

    llama_context_params params = llama_context_default_params();
    params.n_ctx           = 256;
    params.n_batch         = 64;
    params.n_ubatch        = 64;
    params.n_seq_max       = atoi(argv[4]);
    params.n_threads       = 1;
    params.n_threads_batch = 1;
    params.type_k          = type_of(kv.substr(0, slash));
    params.type_v          = type_of(kv.substr(slash + 1));
    params.kv_protect      = atoi(argv[2]);
    params.kv_profile      = argv[5][0] ? argv[5] : nullptr;
    params.flash_attn_type = atoi(argv[3]) ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;

    res.ctx = llama_init_from_model(res.model, params);
    if (!res.ctx) {
        fail("no context");
    }
    res.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(res.model));

    if (!res.decode(1, 0, 0)) {
        fail("the first token cannot be decoded");
    }
    res.expected = res.logits();
    llama_memory_clear(res.memory(), true);

    return res;
}

static void make(const subject & s, int n_seq, const std::string & dir) {
    for (int seq = 0; seq < n_seq; ++seq) {
        if (!s.decode(N_PROMPT, 0, seq)) {
            fail("the prompt cannot be decoded");
        }
    }

    bytes memory(llama_state_seq_get_size(s.ctx, 0));
    memory.resize(llama_state_seq_get_data(s.ctx, memory.data(), memory.size(), 0));
    write_file(dir + "/memory", memory);

    bytes context(llama_state_get_size(s.ctx));
    context.resize(llama_state_get_data(s.ctx, context.data(), context.size()));
    write_file(dir + "/context", context);

    const std::vector<llama_token> tokens(N_PROMPT, 5);
    llama_state_save_file(s.ctx, (dir + "/session").c_str(), tokens.data(), tokens.size());
    llama_state_seq_save_file(s.ctx, (dir + "/sequence").c_str(), 0, tokens.data(), tokens.size());
}

static bool load(const subject & s, int kind, const bytes & data, const std::string & path) {
    std::vector<llama_token> tokens(256);
    size_t n_tokens = 0;

    // a buffer of its own size: a read past it is found
    uint8_t * copy = (uint8_t *) malloc(data.size() ? data.size() : 1);
    memcpy(copy, data.data(), data.size());

    bool res = false;
    switch (kind) {
        case 0: res = llama_state_seq_set_data(s.ctx, copy, data.size(), 0) != 0; break;
        case 1: res = llama_state_set_data(s.ctx, copy, data.size()) != 0; break;
        case 2:
            write_file(path, data);
            res = llama_state_load_file(s.ctx, path.c_str(), tokens.data(), tokens.size(), &n_tokens);
            break;
        case 3:
            write_file(path, data);
            // as the server does: first how many tokens there are
            res = llama_state_seq_load_file(s.ctx, path.c_str(), 0, nullptr, 0, &n_tokens) != 0 &&
                  llama_state_seq_load_file(s.ctx, path.c_str(), 0, tokens.data(), tokens.size(), &n_tokens) != 0;
            break;
    }

    free(copy);

    return res;
}

// what was refused left nothing behind that the next prompt could meet
static void check_clean(const subject & s) {
    llama_memory_seq_rm(s.memory(), -1, -1, -1);
    if (!s.decode(1, 0, 0)) {
        fail("after a refused state nothing can be decoded");
    }
    const auto found = s.logits();
    for (size_t i = 0; i < found.size(); ++i) {
        if (!(std::fabs(found[i] - s.expected[i]) <= 1e-3f*(1.0f + std::fabs(s.expected[i])))) {
            fail("after a refused state the next token is another: logit " + std::to_string(i) + " is " + std::to_string(found[i]) + ", not " + std::to_string(s.expected[i]));
        }
    }
}

// what was accepted can be used and saved
static void use(const subject & s) {
    const llama_pos last = llama_memory_seq_pos_max(s.memory(), 0);
    s.decode(1, last + 1, 0);

    bytes out(llama_state_seq_get_size(s.ctx, 0));
    llama_state_seq_get_data(s.ctx, out.data(), out.size(), 0);
}

int main(int argc, char ** argv) {
    const bool run = argc == 12 && strcmp(argv[1], "run") == 0;
    if (!run && !(argc == 9 && strcmp(argv[1], "make") == 0)) {
        fprintf(stderr, "see the head of state_fuzz.cpp\n");
        return 2;
    }

    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();

    const subject     s   = open_subject(argv + 2);
    const std::string dir = argv[8];

    if (!run) {
        make(s, atoi(argv[6]), dir);
    } else {
        base bases[4];
        for (int kind = 0; kind < 4; ++kind) {
            bases[kind].data = read_file(dir + "/" + KINDS[kind]);
            const bytes marks = read_file(dir + "/" + KINDS[kind] + ".marks");
            bases[kind].marks.resize(marks.size()/4);
            memcpy(bases[kind].marks.data(), marks.data(), bases[kind].marks.size()*4);

            llama_memory_clear(s.memory(), true);
            if (!load(s, kind, bases[kind].data, dir + "/mutated")) {
                fail(std::string("the unchanged ") + KINDS[kind] + " is refused");
            }
            use(s);
        }

        const long to = atol(argv[10]);
        long accepted = 0;

        for (long i = atol(argv[9]); i < to; ++i) {
            write_file(dir + "/at", bytes((uint8_t *) &i, (uint8_t *) &i + sizeof(i)));

            dice d { (uint64_t) atoll(argv[11])*1000003ull + (uint64_t) i };

            const int kind = i % 4;

            llama_memory_clear(s.memory(), true);
            if (load(s, kind, mutated(bases[kind], bases[d.below(4)], d), dir + "/mutated")) {
                ++accepted;
                use(s);
            } else {
                check_clean(s);
            }
        }
        printf("%ld\n", accepted);
    }

    llama_free(s.ctx);
    llama_model_free(s.model);
    llama_backend_free();

    return 0;
}
