// Runs recorded calls of the kernels (recording.py) on copies of the memory that they had, and writes what that becomes.
// Arguments: the file of the calls, and the file to write. FUNCTIONS: the kernels, by the numbers that calls give them.

#include "kernels.c"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

typedef int64_t N;
typedef int Function(N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N);
static Function *const functions[] = {FUNCTIONS};

// image: where its memory lies in the file. Pointers are offsets from there: in the memory, `pointers` of them at the places
// that a list names; and among the arguments, where `points` says so.
typedef struct { N function, image, pointers, list, argument[16], points[16]; } Call;

int main(int count, char **names) {
    const int from = count == 3 ? open(names[1], O_RDONLY) : -1;
    struct stat about;
    if (from < 0 || fstat(from, &about)) return 2;
    char *file = mmap(NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, from, 0);
    if (file == MAP_FAILED) return 2;
    Call *calls = (Call *)(file + CACHE_LINE);
    for (N i = 0; i < *(N *)file; i++) {
        const Call *c = calls + i;
        char *image = file + c->image;
        const N *list = (const N *)(file + c->list);
        N a[16];
        for (int j = 0; j < 16; j++) a[j] = c->argument[j] + (c->points[j] ? (N)image : 0);
        for (N j = 0; j < c->pointers; j++) *(N *)(image + list[j]) += (N)image;
        functions[c->function](
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
        while (!foredraft_settled()) nap();  // late threads read on
        for (N j = 0; j < c->pointers; j++) *(N *)(image + list[j]) -= (N)image;
    }
    FILE *to = fopen(names[2], "wb");
    return !to || fwrite(file, 1, about.st_size, to) != (size_t)about.st_size || fclose(to) ? 2 : 0;
}
