"""What conversations go on about: animals in a table, topics with questions that follow, and sentences about everyday things."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Animal:
    """One animal; `home` begins with its preposition, `fact` speaks of "it"."""

    name: str
    plural: str
    kind: str
    home: str
    food: str
    fact: str


_ANIMALS = """
whale | whales | a mammal | in the sea | fish and tiny sea animals | It breathes air and comes up to the surface to do so.
dolphin | dolphins | a mammal | in the sea | fish | It is very clever and likes to jump out of the water.
shark | sharks | a fish | in the sea | fish and other sea animals | It has many rows of sharp teeth.
octopus | octopuses | a sea animal | on the bottom of the sea | crabs and shellfish | It has eight arms and three hearts.
crab | crabs | a sea animal | on beaches and in the sea | plants and small animals | It has ten legs and walks sideways.
seal | seals | a mammal | in cold seas and on beaches | fish | It swims well but is slow on land.
penguin | penguins | a bird | in the cold south | fish | It cannot fly, but it swims very well.
owl | owls | a bird | in forests and old barns | mice and other small animals | It hunts at night and hears very well.
eagle | eagles | a bird | in the mountains | fish and small animals | It can see a mouse from far away.
parrot | parrots | a bird | in warm forests | seeds and fruit | It can learn to say words.
swan | swans | a bird | on lakes and rivers | water plants | It is white and has a long neck.
duck | ducks | a bird | on lakes and rivers | plants, insects and small fish | Its feathers do not get wet.
chicken | chickens | a bird | on farms | seeds, plants and insects | It lays eggs almost every day.
ostrich | ostriches | a bird | in Africa | plants and seeds | It cannot fly, but it runs very fast.
sparrow | sparrows | a bird | in towns and gardens | seeds and insects | It is small and likes to live near people.
cat | cats | a mammal | in people's homes | meat and fish | It sleeps for more than half of the day.
dog | dogs | a mammal | with people | meat and dog food | It can smell much better than we can.
horse | horses | a mammal | on farms and in fields | grass, hay and oats | It can sleep while it stands.
cow | cows | a mammal | on farms | grass and hay | It gives milk.
pig | pigs | a mammal | on farms | almost anything | It is cleverer than many people think.
sheep | sheep | a mammal | on farms and hills | grass | It gives us wool.
goat | goats | a mammal | on farms and in the mountains | grass, leaves and bushes | It climbs very well.
rabbit | rabbits | a mammal | in holes under the ground | grass, hay and vegetables | It has long ears and hears very well.
mouse | mice | a mammal | in fields and houses | seeds and almost anything | It has many babies in one year.
fox | foxes | a mammal | in forests and fields | mice, birds and berries | It is known for being clever.
wolf | wolves | a mammal | in forests | deer and other animals | It lives and hunts in a group called a pack.
bear | bears | a mammal | in forests and mountains | berries, roots and fish | It sleeps through most of the winter.
lion | lions | a mammal | on the plains of Africa | zebras and other animals | Its roar can be heard from far away.
tiger | tigers | a mammal | in the forests of Asia | deer and other animals | It has stripes, and it can swim.
elephant | elephants | a mammal | in Africa and Asia | grass, leaves and fruit | It is the largest animal on land.
giraffe | giraffes | a mammal | on the plains of Africa | leaves of tall trees | It is the tallest animal in the world.
zebra | zebras | a mammal | on the plains of Africa | grass | No two of them have the same stripes.
monkey | monkeys | a mammal | in warm forests | fruit, leaves and nuts | It uses its tail and hands to climb.
kangaroo | kangaroos | a mammal | in Australia | grass and leaves | It carries its baby in a pouch.
koala | koalas | a mammal | in Australia | leaves of one kind of tree | It sleeps for most of the day.
panda | pandas | a mammal | in the mountains of China | bamboo | It eats for many hours a day.
camel | camels | a mammal | in the desert | dry plants and thorns | It stores fat in its hump.
bat | bats | a mammal | in caves and old houses | insects and fruit | It finds its way at night by sound.
squirrel | squirrels | a mammal | in trees | nuts and seeds | It hides nuts for the winter.
hedgehog | hedgehogs | a mammal | in gardens and hedges | insects and worms | It rolls into a ball when it is afraid.
beaver | beavers | a mammal | by rivers and lakes | bark and leaves | It builds dams of wood.
deer | deer | a mammal | in forests | grass and leaves | The males lose their antlers every year.
hippo | hippos | a mammal | in African rivers | grass | It stays in the water all day to keep cool.
frog | frogs | an amphibian | near ponds | insects and worms | It begins its life as a tadpole.
snake | snakes | a reptile | in warm places | mice and other small animals | It has no legs and smells with its tongue.
turtle | turtles | a reptile | in the sea and on land | plants and small animals | It can live for a very long time.
crocodile | crocodiles | a reptile | in warm rivers | fish and other animals | It can hide under water for a long time.
lizard | lizards | a reptile | in warm places | insects | It likes to lie in the sun.
salmon | salmon | a fish | in rivers and in the sea | smaller fish and insects | It swims back to the river where it was born.
goldfish | goldfish | a fish | in ponds and tanks | plants and insects | It can live for more than ten years.
bee | bees | an insect | in a hive | nectar and pollen | It makes honey.
ant | ants | an insect | in nests under the ground | seeds, insects and sweet things | It can carry much more than its own weight.
butterfly | butterflies | an insect | in gardens and meadows | nectar | It begins its life as a caterpillar.
spider | spiders | an animal with eight legs | almost everywhere | insects | It makes webs of silk.
snail | snails | a small animal with a shell | in gardens | leaves | It is one of the slowest animals.
"""
ANIMALS = tuple(Animal(*(cell.strip() for cell in line.split("|"))) for line in _ANIMALS.strip().splitlines())

# A line is a topic: how it is named; what it is; then questions with their answers, in any order.
_TOPICS = """
the sun # The sun is a star. It gives us light and heat. # Is it a planet? => No, it is a star. # Is the sun a star? => Yes, the sun is a star. # How hot is it? => Its surface is about 5,500 degrees Celsius hot. # How far away is it? => It is about 150 million kilometres away. # Why is it important? => Without it, there would be no life on earth. # Can I look at it? => No, never look straight at it, because it hurts your eyes.
the moon # The moon is a ball of rock that moves around the earth. # Is it a star? => No, it is made of rock and has no light of its own. # Has anybody been there? => Yes, the first people landed there in 1969. # How far away is it? => It is about 384,000 kilometres away. # Is there air? => No, there is no air to breathe. # Why does it change its shape? => We see more or less of its bright side while it moves around us.
the earth # The earth is the planet we live on. # Is it a star? => No, it is a planet. # How old is it? => It is about four and a half billion years old. # What is it made of? => It is made of rock, with a core of iron, and most of it is covered by water. # How long does it take to go around the sun? => It takes one year. # Does it have a moon? => Yes, it has one moon.
Mars # Mars is a planet. It is red, and it is colder than the earth. # Is it a star? => No, it is a planet. # Why is it red? => There is a lot of rust in its dust. # Does anybody live there? => No, nobody lives there. # Is it bigger than the earth? => No, it is smaller.
Jupiter # Jupiter is the largest planet of all. # Is it made of rock? => No, it is mostly made of gas. # Does it have moons? => Yes, it has very many moons. # Is it bigger than the earth? => Yes, it is much bigger.
the stars # Stars are balls of hot gas that are very far away. # Why do they twinkle? => The air above us moves, and that makes their light tremble. # How many are there? => There are more than anybody can count. # Is the sun one of them? => Yes, the sun is a star.
the sea # The sea is deep, wide and salty. Many animals live in it. # Why is it salty? => Rivers carry salt from rocks into it. # What lives in it? => Fish, whales, crabs and many other animals live in it. # How deep is it? => In some places it is about eleven kilometres deep. # Can I drink its water? => No, it is too salty to drink.
rain # Rain is water that falls from the clouds. # Where does it come from? => Water rises into the air, forms clouds and falls down again. # Why do we need it? => Plants, animals and people need its water. # What comes after it? => Sometimes a rainbow comes after it, when the sun shines.
snow # Snow is made of small crystals of ice that fall from the clouds. # Why is it white? => Its crystals throw back all the colours of light. # When does it fall? => It falls when it is very cold, mostly in winter. # What can I do with it? => You can build a snowman with it.
a rainbow # A rainbow is an arc of colours in the sky. # How does it form? => It forms when sunlight shines through drops of rain. # Which colours does it have? => It has red, orange, yellow, green, blue and violet. # Can I touch it? => No, it is only light.
a volcano # A volcano is a mountain that can throw out hot rock and ash. # Is it dangerous? => Yes, it can be very dangerous when it erupts. # What comes out of it? => Hot melted rock, ash and gas come out of it. # Where can I see one? => You can see one in Italy or in Iceland, for example.
bread # Bread is a food made of flour, water and yeast. # How is it made? => You mix the dough, let it rise and bake it. # Why does it rise? => Yeast makes small bubbles of gas in it. # What can I eat with it? => You can eat it with butter, cheese or jam.
tea # Tea is a drink made from dried leaves and hot water. # How do I make it? => Boil water, pour it over the leaves and wait a few minutes. # Where does it come from? => It comes from China, and today it grows in many warm countries. # Is it healthy? => Yes, for most people it is quite healthy.
coffee # Coffee is a drink made from roasted beans. # Where does it grow? => It grows in warm countries such as Brazil. # Why does it wake me up? => It has caffeine in it, which keeps you awake. # Should I drink it at night? => Better not, because it can keep you awake.
chocolate # Chocolate is a sweet food made from cocoa beans. # Where does it come from? => It comes from the beans of the cocoa tree. # Is it healthy? => A little of it is fine, but it has a lot of sugar. # Can my dog eat it? => No, it is poison for dogs.
honey # Honey is a sweet food that bees make. # How do they make it? => Bees collect nectar from flowers and dry it in the hive. # Why do they make it? => It is their food for the winter. # Does it go bad? => No, it keeps for a very long time.
cheese # Cheese is a food made from milk. # How is it made? => Milk is made thick, and the water is taken out. # What goes well with it? => Bread, grapes and nuts go well with it. # Do mice like it? => Not so much. They prefer seeds.
milk # Milk is a white drink that comes mostly from cows. # Is it healthy? => Yes, it has a lot of calcium, which is good for the bones. # What can we make from it? => We can make butter, cheese and yogurt from it. # How long does it keep? => In the fridge it keeps for some days.
football # Football is a game for two teams with one ball. # How many players are there? => Each team has eleven players. # How long is a game? => A game takes ninety minutes. # Can I use my hands? => No, only the goalkeeper may do that.
chess # Chess is a board game for two people. # How do I win? => You win when the other king cannot escape. # How many pieces are there? => Each player has sixteen pieces. # Is it hard to learn? => The rules are easy, but it takes long to play well.
the piano # The piano is a large musical instrument with black and white keys. # How many keys does it have? => Most pianos have eighty-eight keys. # Is it hard to learn? => The first songs are easy, but it takes years to play well. # Who played it well? => Mozart and Beethoven played it very well.
the internet # The internet is a network that connects computers all over the world. # What can I do with it? => You can read, write to friends, learn and watch films. # Is it safe? => Mostly, but never tell strangers your passwords. # How does it work? => Computers send each other small packets of data.
a computer # A computer is a machine that works with data and follows programs. # What is it good for? => You can write, count, play and learn with it. # How does it work? => It follows long lists of simple steps, very fast. # Can it think? => Not like you, but it can calculate very fast.
a library # A library is a place where you can read and borrow books. # What does it cost? => In many places it costs little or nothing. # Who works there? => A librarian works there. # How long can I keep a book? => Often for about four weeks.
a bicycle # A bicycle is a vehicle with two wheels that you move with your feet. # Is it faster than walking? => Yes, it is about three times as fast. # What do I need to ride it? => You need a helmet, a light and a little practice. # Is it good for me? => Yes, it is good for the heart and the legs.
a train # A train is a long vehicle that runs on rails. # How fast is it? => Some of them go more than 300 kilometres an hour. # Who drives it? => A train driver drives it. # Where does it stop? => It stops at stations.
an airplane # An airplane is a machine with wings that flies. # How does it fly? => Its wings push air down, and this lifts it up. # Who flies it? => A pilot flies it. # Is it safe? => Yes, flying is very safe.
sleep # Sleep is the time when the body and the brain rest. # How much of it do I need? => Most adults need about eight hours. # What if I cannot sleep? => Read a little, and put your phone away. # Why do we dream? => Nobody knows exactly. It may help the brain to sort the day.
music # Music is made of sounds and rhythm. # Why do people like it? => It can make us happy, calm or sad. # How can I learn it? => Choose an instrument and play a little every day. # Who was a famous composer? => Mozart was a famous composer.
money # Money is what people use to buy things. # Why do we need it? => It makes it easy to trade one thing for another. # How can I save it? => Put a little aside every month. # Does it make people happy? => A little, but friends and health matter more.
a forest # A forest is a large area with many trees. # What lives in it? => Deer, foxes, owls and many insects live in it. # Why is it important? => Its trees clean the air. # What can I do there? => You can walk, listen to the birds and look for mushrooms.
the desert # The desert is a dry place with very little rain. # Is it always hot? => No, the nights can be very cold. # What lives there? => Camels, snakes and lizards live there. # Which one is the largest hot one? => It is the Sahara in Africa.
winter # Winter is the cold season. # What comes after it? => Spring comes after it. # What can I do then? => You can build a snowman or drink hot tea at home. # Why is it cold? => Our part of the earth gets less sun then.
summer # Summer is the warm season. # What comes after it? => Autumn comes after it. # What can I do then? => You can swim, eat ice cream and sit outside. # Why is it warm? => Our part of the earth gets more sun then.
the heart # The heart is the part of the body that pumps blood. # How often does it beat? => It beats about seventy times a minute. # How can I keep it healthy? => Move a lot, eat vegetables and sleep enough. # Where is it? => It is in the chest, a little to the left.
a tree # A tree is a tall plant with a trunk of wood. # How old does it get? => Some of them get more than a thousand years old. # Why is it important? => It cleans the air and gives shade. # What does it need? => It needs light, water and good soil.
friendship # Friendship is the bond between friends. # Why is it important? => Friends help us and share our joys and sorrows. # How do I find a friend? => Be friendly, listen, and do things together with others. # Can it end? => Yes, but a good talk can often save it.
a robot # A robot is a machine that can do work by itself. # Is it alive? => No, it is only a machine. # What can it do? => It can build cars, clean floors and carry things. # Are you one? => No, I am a program without a body.
"""


@dataclass(frozen=True)
class Topic:
    """Something to talk about, with what is asked about it."""

    name: str
    opening: str
    questions: tuple[tuple[str, str], ...]


def _topic(line: str) -> Topic:
    name, opening, *rest = (cell.strip() for cell in line.split(" # "))
    pairs = [cell.partition(" => ") for cell in rest]
    return Topic(name, opening, tuple((question.strip(), answer.strip()) for question, _, answer in pairs))


TOPICS = tuple(map(_topic, _TOPICS.strip().splitlines()))

# A line is a thing and sentences about it; any two or three of them make a little text.
_SENTENCES = """
the sea # The sea is wide and blue. # The waves roll slowly to the shore. # Gulls fly above the water. # In the evening, the sun sinks into the sea. # Many fish live deep under the waves.
the mountains # The mountains are high and quiet. # Snow lies on their tops all year. # From above, you can see far over the land. # The air up there is clear and cold.
the forest # The forest is green and still. # Tall trees give shade on hot days. # You can hear birds in every tree. # A small path leads through the forest.
rain # The rain falls softly on the roof. # After the rain, the air smells fresh. # The plants are glad about every drop. # Children jump into the puddles.
snow # The snow covers the fields like a white blanket. # Everything is quiet when it snows. # The children build a snowman in the garden. # In the sun, the snow shines like silver.
winter # In winter the days are short and cold. # Snow lies on the roofs and trees. # People drink hot tea and stay at home. # The lake is covered with ice.
summer # In summer the days are long and warm. # Many people swim in lakes and in the sea. # Ice cream tastes best on a hot day. # In the evening, friends sit outside and talk.
spring # In spring the first flowers bloom. # The birds come back and build their nests. # The days get longer and warmer. # Everything is green and fresh again.
autumn # In autumn the leaves turn red and yellow. # The wind blows them through the streets. # Farmers bring in apples and pumpkins. # The evenings get cool and dark.
the night # The night is dark and quiet. # The stars shine above the roofs. # An owl calls from the old tree. # Most people are asleep now.
the morning # In the morning the sun rises slowly. # The birds begin to sing. # The smell of fresh bread fills the street. # A new day begins.
the moon # The moon is round and bright tonight. # It shines on the quiet fields. # Sometimes it hides behind a cloud. # It moves around the earth.
the stars # The stars shine in the dark sky. # They are very far away. # Sailors once found their way with them. # On a clear night you can see thousands of them.
my garden # My garden is small but full of colours. # Roses and tulips grow beside the path. # In the morning, bees visit every flower. # I like to sit there with a book.
a city # The city never sleeps. # Cars and buses fill the streets. # At night, a thousand windows shine. # There are shops, parks and museums.
a village # The village lies between green hills. # Everybody knows everybody there. # An old church stands in the middle. # In the evening it is very quiet.
school # At school, children learn to read and to write. # In the break they play outside. # A good teacher explains things with patience. # Every day brings something new.
music # Music can make us happy or sad. # A good song stays in the mind for days. # People all over the world sing and dance. # My sister plays the piano every evening.
books # A good book is like a friend. # It takes us to places we have never seen. # I like the smell of old pages. # On rainy days there is nothing better.
my family # My family is not big, but we laugh a lot. # On Sundays we eat together. # My grandmother tells the best stories. # We help each other when things are hard.
friends # Good friends listen and help. # With them, a long way seems short. # We share our joys and our worries. # A friend tells you the truth.
a river # The river comes down from the mountains. # It flows through the valley to the sea. # Fish swim in its clear water. # An old bridge leads across it.
the market # The market is full of people on Saturday. # You can buy fresh fruit and vegetables there. # The farmers call out their prices. # It smells of bread and flowers.
a train journey # The train leaves the station slowly. # Fields and houses fly past the window. # A child waves from a garden. # I read a book until we arrive.
breakfast # Breakfast is the first meal of the day. # I like fresh bread with butter and jam. # A cup of tea makes it perfect. # On Sundays we take our time for it.
cats # Cats are soft and quiet animals. # They love warm places and long naps. # At night they go hunting for mice. # A happy cat purrs on your lap.
dogs # Dogs are loyal friends. # They need long walks every day. # A dog is always glad when you come home. # They can smell much better than we can.
horses # Horses are strong and gentle animals. # They can run very fast. # In summer they stand in the green fields. # A rider needs a lot of practice.
birds # Birds sing early in the morning. # They build nests for their young. # Many of them fly south in winter. # Some birds cannot fly at all.
bees # Bees fly from flower to flower. # They collect nectar and make honey. # Without bees, there would be little fruit. # A whole family of them lives in one hive.
flowers # Flowers bloom in many colours. # They smell sweet and make people smile. # Bees and butterflies love them. # A few flowers on the table are enough for a good day.
my home # My home is small and warm. # From the window I can see the park. # There is always a pot of tea on the table. # I feel safe there.
the park # The park is green and full of life. # Children play, and dogs run over the grass. # Old people sit on the benches and talk. # In the middle there is a small lake.
the weather # The weather changes every day. # Yesterday it rained, and today the sun shines. # A little wind comes from the west. # People love to talk about it.
my grandmother # My grandmother is kind and wise. # She tells the best stories. # On Sundays she bakes a cake for us. # Her garden is full of roses.
my grandfather # My grandfather is old, but he laughs a lot. # He taught me to play chess. # In the morning he reads the newspaper. # He knows every tree in the forest.
my mother # My mother is clever and kind. # She works in a hospital. # In the evening she reads to us. # Her soup is the best in the world.
my father # My father is tall and calm. # He likes to cook and to sing. # He taught me to ride a bicycle. # On weekends he works in the garden.
my sister # My sister is funny and brave. # She plays the piano every day. # We share a room and many secrets. # She wants to be a doctor.
my brother # My brother is older than me. # He likes football and loud music. # He helps me with my homework. # Sometimes we fight, but not for long.
my friend # My friend lives next door. # We walk to school together. # My friend always listens to me. # We both love books.
my teacher # My teacher is patient and fair. # She explains things well. # In her lessons we laugh a lot. # She knows all our names.
my cat # My cat is grey and very soft. # She sleeps on my bed all day. # At night she hunts mice. # When she is happy, she purrs.
my dog # My dog is big and friendly. # He loves long walks in the forest. # When I come home, he jumps for joy. # He is afraid of thunder.
a bridge # The old bridge leads over the river. # Every day, many people walk across it. # From the bridge you can see the town. # At night it is full of lights.
a lighthouse # The lighthouse stands on a rock by the sea. # At night its light guides the ships. # An old man lives there with his cat. # The waves beat against its walls.
happiness # Happiness is often found in small things. # A smile, a song or a warm meal is enough. # It grows when you share it. # Nobody can be happy all the time.
"""
SENTENCES = {
    name.strip(): tuple(sentence.strip() for sentence in rest)
    for name, *rest in (line.split(" # ") for line in _SENTENCES.strip().splitlines())
}
